// The plans to choose from: seconds across, bytes up; the line joins the plans that no other one beats in both.
"use strict";
report.plans = { chosen: -1 };

report.plans.option = common => {
  const { plans, front, cap } = report.data;
  const slowest = Math.max(...plans.map(plan => plan.seconds));
  const axis = report.timeAxis(slowest, "s");
  const largest = Math.max(...plans.map(plan => plan.bytes));
  const near = cap !== null && cap <= 1.5 * largest; // a cap far above would press the plans onto the axis: the text has it
  const sizes = [...plans.map(plan => plan.bytes), ...(near ? [cap] : [])];
  const point = at => ({ value: [plans[at].seconds, plans[at].bytes], name: plans[at].name, plan: at, symbolSize: (at === report.plans.chosen ? 20 : 12) * (plans[at].yours ? 2 : 1) });
  const group = (name, symbol, look, z, keep) => ({
    name, type: "scatter", symbol, data: plans.map((_, at) => at).filter(keep).map(point), z,
    itemStyle: { color: report.colour(look), borderColor: report.colour("ink"), borderWidth: 1 },
  });
  const onFront = new Set(front);
  const limit = !near ? {} : { markLine: {
    silent: true, symbol: "none", data: [{ yAxis: cap, name: "cap" }], lineStyle: { color: report.colour("cap"), type: "dashed", width: 2 },
    label: { formatter: `cap ${report.bytes(cap)}`, position: "insideEndTop", color: report.colour("ink") },
  } };
  return {
    tooltip: { ...common.tooltip, trigger: "item", formatter: report.plans.said },
    grid: { left: 84, right: 40, top: 40, bottom: 50 },
    xAxis: report.axis({ lines: true, label: { formatter: axis.label }, axis: { type: "value", boundaryGap: ["4%", "4%"], scale: true, name: `step, ${axis.name}`, nameLocation: "middle", nameGap: 28 } }),
    yAxis: report.bytesAxis(Math.max(...sizes), Math.min(...sizes) * 0.9),
    series: [
      { name: "front", type: "line", step: "end", silent: true, symbol: "none", data: front.map(at => [plans[at].seconds, plans[at].bytes]), lineStyle: { color: report.colour("faint"), width: 2 }, itemStyle: { color: report.colour("faint") }, ...limit },
      group("on the front", "diamond", "F", 5, at => onFront.has(at)),
      group("fits", "circle", "B", 4, at => !onFront.has(at) && plans[at].fits && !plans[at].yours),
      group("over the cap", "triangle", "cap", 4, at => !onFront.has(at) && !plans[at].fits && !plans[at].yours),
      group("yours", "pin", "k2", 6, at => plans[at].yours),
    ].filter(each => each.data.length),
  };
};
report.plans.said = ({ data }) => [
  `<b>${report.escape(data.name)}</b>`, report.time(data.value[0], "s"), report.bytes(data.value[1]),
].join("<br>");

report.plans.start = () => {
  const chart = report.draw("plan-front", 380, report.plans.option);
  const entry = report.charts.find(each => each.chart === chart);
  const rows = [...document.querySelectorAll("[data-plan]")];
  const choose = plan => {
    report.plans.chosen = plan === report.plans.chosen ? -1 : plan;
    rows.forEach((row, at) => {
      row.toggleAttribute("data-chosen", at === report.plans.chosen);
      row.querySelector("button").setAttribute("aria-pressed", String(at === report.plans.chosen));
      const details = row.querySelector(".details");
      if (details) details.hidden = at !== report.plans.chosen;
    });
    chart.setOption({ series: entry.option().series });
  };
  rows.forEach((row, at) => row.addEventListener("click", () => choose(at)));
  chart.on("click", ({ data }) => {
    choose(data.plan);
    rows[data.plan].scrollIntoView({ block: "nearest" });
  });
};
