// Two plans beside each other: stacked bars of seconds and bytes, and a table of their differences.
"use strict";
report.plans.rows = 14; // bars at most
report.plans.looks = {
  forward: "F", backward: "B", recompute: "I", collectives: "collective", bubble: "k4", gradients: "W", optimizer: "send", offload: "receive",
};

// A, B and the first plans that are shown.
report.plans.listed = () => [...new Set([report.plans.A, report.plans.B, ...report.plans.shown])].filter(at => at >= 0).slice(0, report.plans.rows);
report.plans.height = () => 24 * report.plans.listed().length + 124;

report.plans.bars = common => {
  const { plans, cap } = report.data;
  const { A, B, compared } = report.plans;
  const listed = report.plans.listed();
  const letter = at => (at === A && at === B ? "A, B " : at === A ? "A " : at === B ? "B " : "");
  const names = listed.map(at => `${letter(at)}${report.plans.number(at)}: ${plans[at].name.replace(/^yours: /, "")}`);
  const series = ["seconds", "bytes"].flatMap((unit, side) => {
    const kinds = [...new Set(compared.flatMap(({ parts }) => Object.keys(parts[unit])))].filter(name => compared.some(({ parts }) => parts[unit][name]));
    return kinds.map((name, number) => ({
      name: `${unit} ${name}`, type: "bar", stack: unit, xAxisIndex: side, yAxisIndex: side, barMaxWidth: 17,
      itemStyle: unit === "bytes" ? report.memory.colours(name) : { color: report.colour(report.plans.looks[name] ?? "k0"), decal: report.decal(number) },
      data: listed.map(at => compared[at].parts[unit][name] ?? 0),
    }));
  });
  const peak = {
    name: "bytes together", type: "scatter", xAxisIndex: 1, yAxisIndex: 1, symbol: "rect", symbolSize: [5, 22], silent: true, z: 5,
    itemStyle: { color: report.colour("ink"), borderColor: report.colour("page"), borderWidth: 1 }, data: listed.map((at, row) => [plans[at].bytes, row]),
  };
  const most = side => Math.max(...listed.map(at => Math.max(plans[at][side], Object.values(compared[at].parts[side]).reduce((sum, each) => sum + each, 0))));
  const axis = report.timeAxis(most("seconds"), "s");
  const left = Math.round(0.24 * (report.printing ? report.paper : document.getElementById("plan-bars").clientWidth));
  const category = (side, label) => report.axis({ label, axis: { type: "category", inverse: true, gridIndex: side, data: names } });
  const limit = cap !== null && cap <= 1.5 * most("bytes") ? { markLine: {
    silent: true, symbol: "none", data: [{ xAxis: cap }], lineStyle: { color: report.colour("cap"), type: "dashed", width: 2 },
    label: { formatter: "cap", position: "start", distance: 4, color: report.colour("ink") },
  } } : {};
  const legend = (unit, place) => ({
    ...common.legend, ...place, width: "40%", itemWidth: 16, data: series.map(({ name }) => name).filter(name => name.startsWith(unit)),
    formatter: name => name.slice(unit.length + 1),
  });
  return {
    tooltip: { ...common.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: report.plans.parted },
    legend: [legend("seconds", { left: 0 }), legend("bytes", { left: "58%" })],
    grid: [{ left, right: "46%", top: 66, bottom: 50 }, { left: "58%", right: 30, top: 66, bottom: 50 }],
    xAxis: [
      report.axis({ lines: true, label: { formatter: axis.label }, axis: { type: "value", gridIndex: 0, min: 0, name: `seconds of a step, ${axis.name}`, nameLocation: "middle", nameGap: 26 } }),
      { ...report.bytesAxis(Math.max(most("bytes"), limit.markLine ? cap : 0)), gridIndex: 1, name: "bytes of the fullest rank", nameLocation: "middle", nameGap: 26 },
    ],
    yAxis: [category(0, { width: left - 14, overflow: "truncate" }), category(1, { show: false })],
    series: [...series, { ...peak, ...limit }],
  };
};
report.plans.parted = items => {
  const at = report.plans.listed()[items[0].dataIndex];
  const unit = items[0].seriesName.split(" ")[0];
  const spell = unit === "bytes" ? report.bytes : seconds => report.time(seconds, "s");
  const lines = items.filter(({ value, seriesType }) => seriesType === "bar" && value).map(({ marker, seriesName, value }) => `${marker} ${report.escape(seriesName.slice(unit.length + 1))}  <b>${spell(value)}</b>`);
  return [report.plans.said(at), ...lines].join("<br>");
};

report.plans.spell = (number, unit) => {
  const forms = { seconds: each => report.time(each, "s"), bytes: report.bytes, share: each => `${(100 * each).toFixed(2)}%` };
  return (forms[unit] ?? (each => Number(each < 1000 ? each.toPrecision(3) : each.toFixed(0)).toLocaleString("en")))(number);
};

// The numbers of both plans, and the choices that differ; the bar of a difference is as long as its share of the largest one of
// its unit.
report.plans.compare = () => {
  const [one, other] = [report.plans.A, report.plans.B].map(at => report.plans.compared[at]);
  const bodies = ["numbers", "choices"].map(name => document.querySelector(`#pair-${name} tbody`));
  for (const body of bodies) body.textContent = "";
  document.getElementById("pair-tables").hidden = !other;
  document.getElementById("pair-equal").textContent = other ? "" : "Choose a plan B.";
  if (!other) return;
  const equal = Object.keys(one.texts).filter(name => one.texts[name] === other.texts[name]);
  if (equal.length) document.getElementById("pair-equal").textContent = `Equal in both: ${equal.map(name => `${name} ${one.texts[name]}`).join("; ")}.`;
  report.rows(bodies[1], Object.keys(one.texts).filter(name => !equal.includes(name)).map(name => [name, one.texts[name], other.texts[name]]));
  const lines = report.plans.differences(one.numbers, other.numbers);
  for (const { name, unit, low, high } of lines) {
    const change = high - low;
    const text = change ? `${change > 0 ? "+" : "−"}${report.plans.spell(Math.abs(change), unit)}` : "equal";
    const [row] = report.rows(bodies[0], [[name, report.plans.spell(low, unit), report.plans.spell(high, unit), text, ""]]);
    if (!change || !["seconds", "bytes"].includes(unit)) continue;
    const most = Math.max(...lines.filter(line => line.unit === unit && !line.name.startsWith("sent ")).map(line => Math.abs(line.high - line.low)));
    const bar = document.createElement("span");
    bar.className = change > 0 ? "more" : "less";
    bar.style.width = `${Math.min(Math.max((100 * Math.abs(change)) / most, 1), 100)}px`;
    if (!name.startsWith("sent ")) row.cells[4].append(bar);
  }
};

// The numbers that one plan or both have, without those that are 0 in both.
report.plans.differences = (first, second) => {
  const lines = new Map();
  for (const [side, numbers] of [["low", first], ["high", second]]) {
    for (const [name, unit, number] of numbers) {
      const key = `${name}/${unit}`;
      if (!lines.has(key)) lines.set(key, { name, unit, low: 0, high: 0 });
      lines.get(key)[side] = number;
    }
  }
  return [...lines.values()].filter(({ low, high }) => low || high);
};
