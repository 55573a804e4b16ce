// The bars of stages and of boundaries.
"use strict";
report.bars = (name, labels, series) => common => ({
  tooltip: { ...common.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, valueFormatter: report.bytes },
  grid: { left: 78, right: 20, top: 40, bottom: 44 },
  xAxis: report.axis({ axis: { type: "category", data: labels, name, nameLocation: "middle", nameGap: 26 } }),
  yAxis: report.bytesAxis(Math.max(...series.flatMap(({ values }) => values))),
  series: series.map(({ name: of, values, look }) => ({
    name: of, type: "bar", barMaxWidth: 36, data: values, itemStyle: { color: report.colour(`k${look}`), decal: report.decal(look) },
  })),
});

report.stageBars = () => {
  const stages = report.data.stages;
  report.draw("stage-bars", 250, report.bars("stage", stages.map((_, stage) => String(stage)), [
    { name: "parameters", values: stages.map(each => each.parameters), look: 0 },
    { name: "saved by a microbatch", values: stages.map(each => each.saved), look: 6 },
  ]));
};

report.boundaryBars = () => {
  const boundaries = report.data.boundaries;
  const relays = boundaries.some(each => each.relayed) ? [{ name: "of relays, both ways", values: boundaries.map(each => each.relayed), look: 2 }] : [];
  report.draw("boundary-bars", 250, report.bars("boundary", boundaries.map((_, stage) => `${stage} | ${stage + 1}`), [
    { name: "forward", values: boundaries.map(each => each.forward), look: 0 },
    { name: "backward", values: boundaries.map(each => each.backward), look: 1 },
    ...relays,
  ]));
};
