// The memory of a step: each rank's bytes by kind at its peak, and one rank's bytes over time, beside the cap.
"use strict";
report.memory = { rank: 0 };

// A kind has the same colour and pattern on every page.
report.memory.known = ["weights", "gradients", "optimizer", "activations", "buffers", "shards", "messages"];
report.memory.colours = name => {
  const at = Math.max(report.memory.known.indexOf(name), 0);
  return { color: report.colour(`k${at}`), decal: report.decal(at) };
};

report.memory.peaks = common => {
  const { kinds, peaks, caps } = report.data.memory;
  const ranks = peaks.map((_, rank) => String(rank));
  const bars = kinds.map((name, at) => ({
    name, type: "bar", stack: "bytes", barMaxWidth: 64, itemStyle: report.memory.colours(name), data: peaks.map(each => each[at]),
  }));
  const cap = caps.some(each => each !== null) ? [report.memory.cap(caps)] : [];
  return {
    tooltip: { ...common.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: report.memory.said },
    grid: { left: 78, right: 20, top: 40, bottom: 44 },
    xAxis: report.axis({ axis: { type: "category", data: ranks, name: "rank", nameLocation: "middle", nameGap: 26 } }),
    yAxis: report.bytesAxis(report.memory.most(peaks.map((_, rank) => rank))),
    series: [...bars, ...cap],
  };
};
// The highest point of a chart of these ranks: bytes together, or the cap.
report.memory.most = ranks => Math.max(...ranks.map(rank => {
  const { peaks, caps } = report.data.memory;
  return Math.max(peaks[rank].reduce((sum, bytes) => sum + bytes, 0), caps[rank] ?? 0);
}));
report.memory.cap = values => ({
  name: "cap", type: "line", step: "middle", data: values, symbol: "diamond", symbolSize: 8, z: 5,
  itemStyle: { color: report.colour("cap") }, lineStyle: { color: report.colour("cap"), type: "dashed", width: 2 },
});
// The texts of a tooltip: each kind, and the sum of all but the cap. Of two moments at one time, the later one counts.
report.memory.said = items => {
  const last = new Map(items.filter(({ value }) => value !== null && value !== undefined).map(item => [item.seriesName, item]));
  const kept = [...last.values()];
  const bytes = item => (Array.isArray(item.value) ? item.value[1] : item.value);
  const lines = kept.map(item => `${item.marker} ${report.escape(item.seriesName)}  <b>${report.bytes(bytes(item))}</b>`);
  const total = kept.filter(({ seriesName }) => seriesName !== "cap").reduce((sum, item) => sum + bytes(item), 0);
  const head = Array.isArray(kept[0]?.value) ? report.time(kept[0].value[0], report.data.memory.unit) : `rank ${kept[0]?.name}`;
  return [head, ...lines, `together  <b>${report.bytes(total)}</b>`].join("<br>");
};

report.memory.overTime = common => {
  const { kinds, times, curves, caps, unit } = report.data.memory;
  const moments = report.column(times[report.memory.rank]);
  const span = Math.max(...times.map(place => report.column(place)[place.count - 1] ?? 0), ...report.memory.spans()) || 1;
  const axis = report.timeAxis(span, unit);
  const areas = kinds.map((name, at) => {
    const values = report.column(curves[report.memory.rank][at]);
    return {
      name, type: "line", step: "end", stack: "bytes", symbol: "none", lineStyle: { width: 1, color: report.colour("ink"), opacity: 0.5 },
      itemStyle: report.memory.colours(name), emphasis: { disabled: true }, areaStyle: { opacity: 1 }, data: Array.from(moments, (time, moment) => [time, values[moment]]),
    };
  });
  const cap = caps[report.memory.rank];
  if (cap !== null) areas.push({ ...report.memory.cap([[0, cap], [span, cap]]), symbol: "none", step: false });
  return {
    tooltip: { ...common.tooltip, trigger: "axis", formatter: report.memory.said },
    legend: { ...common.legend, icon: "roundRect" },
    grid: { left: 78, right: 46, top: 40, bottom: 66 },
    xAxis: report.axis({ label: { formatter: axis.label, showMaxLabel: false }, axis: { type: "value", min: 0, max: span, name: axis.name } }),
    yAxis: report.bytesAxis(report.memory.most([report.memory.rank])),
    dataZoom: [
      { type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      { ...report.slider(8), xAxisIndex: 0, filterMode: "none", labelFormatter: time => report.time(time, unit) },
    ],
    series: areas,
  };
};
// The lengths of the timelines that share the unit: one axis, so that the charts move together.
report.memory.spans = () => report.data.timelines.filter(view => view.unit === report.data.memory.unit).map(view => view.makespan);

report.memory.start = () => {
  const { peaks } = report.data.memory;
  const totals = peaks.map(each => each.reduce((sum, value) => sum + value, 0));
  report.memory.rank = totals.indexOf(Math.max(...totals));
  const far = cap => cap !== null && cap > 4 * Math.max(...totals); // such a cap would press the bars onto the axis
  document.getElementById("memory-far").hidden = !report.data.memory.caps.some(far);
  report.data.memory.caps = report.data.memory.caps.map(cap => (far(cap) ? null : cap));
  const bars = report.draw("memory-peaks", 320, report.memory.peaks);
  const choice = document.getElementById("memory-rank");
  if (!choice) return;
  const chart = report.draw("memory-time", 340, report.memory.overTime);
  if (report.memory.spans().length === report.data.timelines.length) chart.group = "time";
  const choose = rank => {
    report.memory.rank = rank;
    choice.value = rank;
    const entry = report.charts.find(each => each.chart === chart);
    const { series, yAxis } = entry.option();
    chart.setOption({ series, yAxis }, { replaceMerge: ["series"] });
  };
  choice.value = report.memory.rank;
  choice.addEventListener("change", () => choose(Number(choice.value)));
  bars.getZr().on("click", ({ offsetX, offsetY }) => {
    if (!bars.containPixel({ gridIndex: 0 }, [offsetX, offsetY])) return;
    const [rank] = bars.convertFromPixel({ gridIndex: 0 }, [offsetX, offsetY]);
    if (rank >= 0 && rank < peaks.length) choose(rank);
  });
};
