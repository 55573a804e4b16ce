// The timelines: one chart each, zoomed together, and the path of a selected microbatch over the ranks.
"use strict";
report.timelines = { views: [], selected: -1 };

report.timelines.look = (kind, chunk, chunks, key) => {
  const base = report.colour(report.data.kinds[kind]);
  const fill = report.mix(base, report.colour("page"), chunks > 1 ? (0.45 * chunk) / (chunks - 1) : 0);
  const dimmed = key.endsWith("dim");
  return { fill: dimmed ? report.mix(fill, report.colour("page"), 0.72) : fill, chosen: key.endsWith("chosen"), dimmed };
};

report.timelines.series = ({ view, boxes }) => {
  const ranks = view.rows.length - 1;
  const present = report.data.kinds.map((_, kind) => boxes.kind.includes(kind));
  const names = ["F forward", "B backward", "I input gradient", "W weight gradient", "R recomputation", "send", "receive", "collective"];
  const series = names.flatMap((name, kind) => (present[kind] ? [{
    name, type: "custom", silent: true, clip: true, progressive: 0, z: kind >= MESSAGE ? 4 : 3,
    itemStyle: { color: report.colour(report.data.kinds[kind]), decal: report.decal(kind) },
    encode: { x: 0, y: 1 }, data: Array.from({ length: ranks }, (_, rank) => [0, rank]),
    renderItem: (params, api) => report.timelines.row(view, boxes, kind, params.dataIndex, params.coordSys, api),
  }] : []));
  return [...series, {
    name: "path", type: "line", silent: true, showSymbol: false, z: 6, data: report.timelines.path(view, boxes).points,
    lineStyle: { color: report.colour("ink"), width: 2 }, itemStyle: { color: report.colour("ink") }, legendHoverLink: false,
  }];
};

report.timelines.row = (view, boxes, kind, rank, area, api) => {
  const selected = report.timelines.selected;
  const letter = report.data.kinds[kind];
  const { runs, texts, perTime, height } = report.rankShapes(boxes, kind, rank, area, api, { selected, letter, digits: String(view.microbatches - 1).length });
  const large = (boxes.longest[rank] * perTime) > 5 && height > 9; // a pattern needs some pixels to be seen
  const children = [...runs].map(([key, run]) => {
    const { fill, chosen, dimmed } = report.timelines.look(kind, parseInt(key), view.chunks, key);
    const style = { fill, lineWidth: chosen ? 2 : 0, stroke: chosen ? report.colour("ink") : null };
    if (large && !dimmed && kind < MESSAGE) style.decal = report.decal(kind);
    return { type: "actions", shape: { boxes: run }, style, z2: chosen ? 2 : 1 };
  });
  for (const [x, y, text, key] of texts) {
    const { fill, dimmed } = report.timelines.look(kind, parseInt(key), view.chunks, key);
    if (dimmed) continue;
    const halo = large && report.patterns && kind ? { stroke: fill, lineWidth: 3 } : {};
    children.push({
      type: "text", z2: 3,
      style: { x, y, text, fill: report.inkOn(fill), align: "center", verticalAlign: "middle", fontSize: 11, ...halo },
    });
  }
  return { type: "group", children };
};

// The forwards and backwards of the selected microbatch in the order of their starts: points of a line, and rows of a table.
report.timelines.path = (view, boxes) => {
  const found = [];
  for (let rank = 0; report.timelines.selected >= 0 && rank + 1 < boxes.rows.length; rank++) {
    for (let at = boxes.rows[rank]; at < boxes.rows[rank + 1]; at++) {
      if (boxes.microbatch[at] === report.timelines.selected && boxes.kind[at] < MESSAGE) found.push({ at, rank });
    }
  }
  found.sort((one, other) => boxes.start[one.at] - boxes.start[other.at]);
  const through = found.filter(({ at }) => boxes.kind[at] < 3); // weight gradients wait for nobody
  const gap = ["-", "-"]; // the line joins boxes and does not cross them
  const points = through.flatMap(({ at, rank }) => [[boxes.start[at], rank], gap, [boxes.start[at] + boxes.duration[at], rank]]);
  return { found, points };
};

report.timelines.option = entry => common => {
  const { view, span } = entry;
  const axis = report.timeAxis(span, view.unit);
  const ranks = view.rows.length - 1;
  return {
    tooltip: { ...common.tooltip, show: false },
    legend: { ...common.legend, data: report.timelines.series(entry).map(({ name }) => name).filter(name => name !== "path") },
    grid: { left: 64, right: 46, top: 34, bottom: 62 },
    xAxis: report.axis({
      lines: true, label: { formatter: time => (time === span || time < 0.92 * span ? axis.label(time) : "") }, // the end of the step is named
      axis: { type: "value", min: 0, max: span, name: axis.name, nameLocation: "end", axisTick: { show: true, lineStyle: { color: report.colour("faint") } } },
    }),
    yAxis: report.axis({
      label: { formatter: rank => `rank ${rank}` },
      axis: { type: "category", inverse: true, data: Array.from({ length: ranks }, (_, rank) => String(rank)), splitArea: { show: true, areaStyle: { color: [report.colour("row"), report.colour("panel")] } } },
    }),
    dataZoom: [
      { type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, minSpan: 0.01 },
      { ...report.slider(8), xAxisIndex: 0, filterMode: "none", labelFormatter: time => report.time(time, view.unit), minSpan: 0.01 },
    ],
    series: report.timelines.series(entry),
  };
};

report.timelines.start = () => {
  report.timelines.controls();
  report.timelines.show();
};

// The page's timelines and the steps of the chosen plans; whole steps in one unit share an axis.
report.timelines.show = () => {
  const shown = [...report.data.timelines.map((view, number) => ({ id: `timeline-${number}`, view })), ...report.plans.steps()];
  const views = shown.map(({ view }) => view);
  const shared = new Set(views.map(view => view.unit)).size === 1 && views.every(view => view.whole);
  const longest = Math.max(...views.map(view => view.makespan));
  report.timelines.views = shown.map(({ id, view }) => {
    const ranks = view.rows.length - 1;
    const entry = { view, boxes: report.boxes(view), span: (shared ? longest : view.makespan) || 1 };
    entry.chart = report.draw(id, Math.round(ranks * Math.min(Math.max(760 / ranks, 13), 34)) + 96, report.timelines.option(entry));
    if (shared) entry.chart.group = "time";
    report.timelines.listen(entry);
    return entry;
  });
  if (shared) echarts.connect("time");
  document.getElementById("microbatch").max = Math.max(...views.map(view => view.microbatches)) - 1;
  report.timelines.select(-1);
};

// The box under the pointer, or -1.
report.timelines.under = ({ chart, boxes }, x, y) => {
  if (!chart.containPixel({ gridIndex: 0 }, [x, y])) return -1;
  const [time, rank] = chart.convertFromPixel({ gridIndex: 0 }, [x, y]);
  if (rank < 0 || rank + 1 >= boxes.rows.length) return -1;
  const [, centre] = chart.convertToPixel({ gridIndex: 0 }, [time, rank]);
  const band = rank + 1 < boxes.rows.length - 1
    ? chart.convertToPixel({ gridIndex: 0 }, [time, rank + 1])[1] - centre
    : rank ? centre - chart.convertToPixel({ gridIndex: 0 }, [time, rank - 1])[1] : chart.getHeight() - 96;
  return report.boxAt(boxes, rank, time, (y - centre) / (band * THICK) + 0.5);
};

report.timelines.describe = ({ view, boxes }, at) => {
  const kind = report.data.kinds[boxes.kind[at]];
  const names = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "recomputation" };
  const what = names[kind] ? `${boxes.stage[at]}${kind}${boxes.microbatch[at]}  ${names[kind]}` : kind;
  const numbers = boxes.microbatch[at] >= 0 ? `stage ${boxes.stage[at]}, microbatch ${boxes.microbatch[at]}` : `stage ${boxes.stage[at]}`;
  const times = [boxes.start[at], boxes.start[at] + boxes.duration[at], boxes.duration[at]].map(time => report.time(time, view.unit));
  return `${what}\n${numbers}\nstart ${times[0]}\nend ${times[1]}\nduration ${times[2]}`;
};

report.timelines.listen = entry => {
  const { chart, boxes } = entry;
  const tip = document.getElementById("tip");
  const surface = chart.getZr();
  surface.on("mousemove", ({ offsetX, offsetY, event }) => {
    const at = report.timelines.under(entry, offsetX, offsetY);
    tip.hidden = at < 0;
    surface.setCursorStyle(at < 0 ? "default" : "pointer");
    if (at < 0) return;
    tip.textContent = report.timelines.describe(entry, at);
    const left = Math.min(event.pageX + 14, window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
    Object.assign(tip.style, { left: `${left}px`, top: `${event.pageY + 16}px` });
  });
  surface.on("globalout", () => { tip.hidden = true; });
  surface.on("click", ({ offsetX, offsetY }) => {
    const at = report.timelines.under(entry, offsetX, offsetY);
    const microbatch = at < 0 ? -1 : boxes.microbatch[at];
    report.timelines.select(microbatch === report.timelines.selected ? -1 : microbatch);
  });
  const element = chart.getDom();
  element.tabIndex = 0;
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" };
  element.addEventListener("keydown", event => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    report.timelines.zoom(keys[event.key], entry);
  });
};

report.timelines.zoom = (how, only) => {
  const shared = report.timelines.views[0]?.chart.group ? report.timelines.views.slice(0, 1) : report.timelines.views;
  for (const { chart } of only && !only.chart.group ? [only] : shared) {
    const { start, end } = chart.getOption().dataZoom[0];
    const [centre, half] = [(start + end) / 2, (end - start) / 2];
    const move = { left: [-half / 2, 1], right: [half / 2, 1], in: [0, 0.5], out: [0, 2], all: [50 - centre, Infinity] }[how];
    const width = Math.min(half * move[1], 50);
    const middle = Math.min(Math.max(centre + move[0], width), 100 - width);
    chart.dispatchAction({ type: "dataZoom", start: middle - width, end: middle + width });
  }
};

report.timelines.controls = () => {
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => report.timelines.zoom(button.dataset.zoom));
  }
  const field = document.getElementById("microbatch");
  field.addEventListener("change", () => report.timelines.select(field.value === "" ? -1 : Number(field.value)));
  document.getElementById("microbatch-none").addEventListener("click", () => report.timelines.select(-1));
};

report.timelines.select = microbatch => {
  const most = Number(document.getElementById("microbatch").max);
  report.timelines.selected = Number.isInteger(microbatch) && microbatch >= 0 && microbatch <= most ? microbatch : -1;
  const selected = report.timelines.selected;
  document.getElementById("microbatch").value = selected < 0 ? "" : selected;
  document.getElementById("microbatch-none").disabled = selected < 0;
  for (const entry of report.timelines.views) entry.chart.setOption({ series: report.timelines.series(entry) });
  report.timelines.say();
};

// The selected microbatch in words, and the table of its path.
report.timelines.say = () => {
  const details = document.getElementById("path");
  const body = details.querySelector("tbody");
  const lines = [];
  body.textContent = "";
  for (const { view, boxes } of report.timelines.views) {
    const { found } = report.timelines.path(view, boxes);
    if (!found.length) continue;
    const end = Math.max(...found.map(({ at }) => boxes.start[at] + boxes.duration[at]));
    const ranks = new Set(found.map(({ rank }) => rank)).size;
    lines.push(`${view.name}: microbatch ${report.timelines.selected} has ${found.length} actions on ${ranks} ranks, from ${report.time(boxes.start[found[0].at], view.unit)} to ${report.time(end, view.unit)}.`);
    let before = null;
    for (const { at, rank } of found) {
      const [start, stop] = [boxes.start[at], boxes.start[at] + boxes.duration[at]];
      const waited = before === null ? "" : report.time(start - before, view.unit);
      const cells = [`${view.name} ${boxes.stage[at]}${report.data.kinds[boxes.kind[at]]}${boxes.microbatch[at]}`, rank, ...[start, stop, stop - start].map(time => report.time(time, view.unit)), waited];
      const row = body.insertRow();
      cells.forEach((text, column) => {
        const cell = row.insertCell();
        cell.textContent = text;
        if (!column) cell.className = "text";
      });
      before = stop;
    }
  }
  details.hidden = !lines.length;
  document.getElementById("selection").textContent = lines.join(" ");
};
