// The parts that all charts share: the page's data, colours, texts of numbers, and the list of charts that are drawn anew when
// the theme, the width or the medium changes. `report` is the only global name of the page.
"use strict";
const report = { data: JSON.parse(document.getElementById("data").textContent), charts: [], patterns: true, printing: false };

// The columns of numbers: one compressed block, read as typed arrays.
report.unpack = async () => {
  const letters = atob(document.getElementById("columns").textContent);
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  report.block = await new Response(stream).arrayBuffer();
};
report.types = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
report.column = place => new report.types[place.type](report.block, place.at, place.count);

// Numbers as texts, as graphpp/units.py writes them.
report.bytes = count => {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  for (; count >= 1024 && at < 3; at++) count /= 1024;
  return at ? `${count.toFixed(1)} ${units[at]}` : `${Math.round(count)} B`;
};
report.time = (time, unit) => {
  let factor = 1;
  if (unit === "s" && Math.abs(time) < 1) [factor, unit] = Math.abs(time) >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((time * factor).toPrecision(4))} ${unit}`;
};
// The labels of an axis up to `span`: all in one unit.
report.timeAxis = (span, unit) => {
  const [factor, name] = unit !== "s" || span >= 1 ? [1, unit] : span >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return { name, label: time => String(Number((time * factor).toPrecision(5))) };
};

report.colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
report.channels = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
report.mix = (hex, other, share) => {
  const [one, two] = [report.channels(hex), report.channels(other)];
  return "#" + one.map((value, at) => Math.round(value + (two[at] - value) * share).toString(16).padStart(2, "0")).join("");
};
report.inkOn = hex => {
  const [red, green, blue] = report.channels(hex);
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128 ? "#ffffff" : "#14181d";
};
// Patterns that tell the parts of a chart apart without colours; the first part is plain.
report.decal = number => {
  const forms = [
    null,
    { dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: -Math.PI / 4 },
    { symbol: "circle", dashArrayX: [[6, 6], [0, 6, 6, 0]], dashArrayY: [5, 0], symbolSize: 0.7 },
    { dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: Math.PI / 4 },
    { dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: 0 },
    { dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: Math.PI / 2 },
    { symbol: "triangle", dashArrayX: [[8, 8], [0, 8, 8, 0]], dashArrayY: [8, 0], symbolSize: 0.8 },
  ];
  const form = forms[number % forms.length];
  return form && report.patterns ? { ...form, color: report.colour("pattern") } : { symbol: "none" };
};

// The parts of an option that all charts have alike.
report.common = label => ({
  animation: false,
  textStyle: { color: report.colour("ink"), fontFamily: "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif" },
  aria: { enabled: true, label: { description: label } },
  tooltip: {
    backgroundColor: report.colour("page"), borderColor: report.colour("faint"), textStyle: { color: report.colour("ink"), fontSize: 13 },
    confine: true,
  },
  legend: {
    top: 0, left: 0, itemWidth: 22, itemHeight: 13, textStyle: { color: report.colour("ink") }, inactiveColor: report.colour("line"),
  },
});
report.axis = more => ({
  axisLabel: { color: report.colour("ink"), hideOverlap: true, ...more.label }, axisLine: { lineStyle: { color: report.colour("faint") } },
  axisTick: { show: false, lineStyle: { color: report.colour("faint") } }, nameTextStyle: { color: report.colour("faint") },
  splitLine: { show: more.lines ?? false, lineStyle: { color: report.colour("line") } },
  ...more.axis,
});
// An axis of bytes from `low` to `high`, with ticks at round numbers of KiB, MiB or GiB.
report.bytesAxis = (high, low = 0) => {
  const rough = Math.max((high - low) / 4, 1);
  const unit = 1024 ** Math.floor(Math.log2(rough) / 10);
  const interval = unit * [1, 2, 4, 5, 10, 20, 50, 100, 200, 250, 500, 1024].find(step => step * unit >= rough);
  const [min, max] = [Math.floor(low / interval) * interval, Math.ceil(high / interval) * interval || interval];
  return report.axis({ lines: true, label: { formatter: report.bytes }, axis: { type: "value", min, max, interval } });
};
report.slider = bottom => ({
  type: "slider", show: !report.printing, bottom, height: 18, showDataShadow: false, brushSelect: false, borderColor: report.colour("line"),
  fillerColor: report.mix(report.colour("accent"), report.colour("page"), 0.75) + "88", handleStyle: { color: report.colour("accent") },
  moveHandleSize: 0, textStyle: { color: report.colour("faint") },
});
// Rows at the end of a table's body; the first cell is the head of its row.
report.rows = (body, rows) => rows.map(cells => {
  const row = body.insertRow();
  cells.forEach((text, at) => {
    const cell = document.createElement(at ? "td" : "th");
    if (!at) Object.assign(cell, { scope: "row", className: "text" });
    cell.textContent = text;
    row.append(cell);
  });
  return row;
});
report.escape = text => echarts.format.encodeHTML(String(text));

report.drop = element => {
  echarts.getInstanceByDom(element)?.dispose();
  report.charts = report.charts.filter(each => each.element !== element);
  element.textContent = "";
};
// A chart: `option()` gives its option for the theme of the moment, `height` its pixels.
report.draw = (id, height, option) => {
  const element = document.getElementById(id);
  report.drop(element);
  element.style.height = `${height}px`;
  const label = element.getAttribute("aria-label");
  const chart = echarts.init(element, null, { renderer: "canvas" });
  const entry = { chart, element, option: () => ({ ...report.common(label), ...option(report.common(label)) }) };
  chart.setOption(entry.option());
  report.charts.push(entry);
  return chart;
};
report.redraw = () => {
  for (const { chart, option } of report.charts) {
    const zoom = (chart.getOption().dataZoom || []).map(({ start, end }) => ({ start, end }));
    const fresh = option();
    if (fresh.dataZoom) fresh.dataZoom = fresh.dataZoom.map((each, at) => ({ ...each, ...zoom[at] }));
    chart.setOption(fresh, { notMerge: true });
  }
};
report.resize = width => {
  for (const { chart, element } of report.charts) chart.resize({ width: width || element.clientWidth });
};
