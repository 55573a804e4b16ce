// The plans of a search: which are shown, which two are chosen, and the chart of seconds against bytes.
"use strict";
report.plans = { A: 0, B: -1, shown: [], colour: "" };

report.plans.number = at => (report.data.plans[at].yours ? "yours" : String(at + 1));

// The value of a plan in the column that colours marks, as its place among all values; dark to light along a ramp that is read
// without colours, too.
report.plans.values = column => {
  const found = [...new Set(report.data.plans.map(plan => plan.values[column]))];
  return found.sort((one, other) => (typeof one === "number" ? one - other : String(one).localeCompare(String(other))));
};
report.plans.ramp = share => {
  const stops = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];
  const at = Math.min(Math.floor(share * (stops.length - 1)), stops.length - 2);
  return report.mix(stops[at], stops[at + 1], share * (stops.length - 1) - at);
};

report.plans.option = common => {
  const { plans, front, cap } = report.data;
  const { shown, colour, A, B } = report.plans;
  const axis = report.timeAxis(Math.max(...plans.map(plan => plan.seconds)), "s");
  const largest = Math.max(...plans.map(plan => plan.bytes));
  const near = cap !== null && cap <= 1.5 * largest; // a cap far above would press the plans onto the axis: the text has it
  const onFront = new Set(front);
  const point = at => {
    const plan = plans[at];
    const letter = [at === A ? "A" : "", at === B ? "B" : "", plan.yours ? "yours" : ""].filter(Boolean).join(", ");
    return {
      value: [plan.seconds, plan.bytes], plan: at, symbolSize: plan.yours ? 34 : letter ? 18 : 11,
      symbol: plan.yours ? "pin" : !plan.fits ? "triangle" : onFront.has(at) ? "diamond" : "circle",
      label: { show: Boolean(letter), formatter: letter, position: "top", fontWeight: 700, color: report.colour("ink"), textBorderColor: report.colour("page"), textBorderWidth: 3 },
    };
  };
  const values = report.plans.values(colour);
  const drawn = [...new Set([...shown, A, B])].filter(at => at >= 0); // the chosen ones whatever the filters
  const named = value => (typeof value === "number" ? `${colour} ${report.plans.texts(colour).get(value)}` : report.plans.texts(colour).get(value));
  const groups = values.map((value, number) => ({
    name: colour ? named(value) : "plans", type: "scatter", z: 4, data: drawn.filter(at => plans[at].values[colour] === value).map(point),
    itemStyle: { color: report.plans.ramp(values.length > 1 ? number / (values.length - 1) : 0.4), borderColor: report.colour("ink"), borderWidth: 1 },
  }));
  const limit = !near ? {} : { markLine: {
    silent: true, symbol: "none", data: [{ yAxis: cap, name: "cap" }], lineStyle: { color: report.colour("cap"), type: "dashed", width: 2 },
    label: { formatter: `cap ${report.bytes(cap)}`, position: "insideEndTop", color: report.colour("ink") },
  } };
  return {
    tooltip: { ...common.tooltip, trigger: "item", formatter: ({ data }) => report.plans.said(data.plan) },
    legend: { ...common.legend, type: "scroll", right: 40, pageIconColor: report.colour("accent"), pageTextStyle: { color: report.colour("ink") } },
    grid: { left: 84, right: 40, top: 44, bottom: 50 },
    xAxis: report.axis({ lines: true, label: { formatter: axis.label }, axis: { type: "value", boundaryGap: ["4%", "4%"], scale: true, name: `step, ${axis.name}`, nameLocation: "middle", nameGap: 28 } }),
    yAxis: report.bytesAxis(Math.max(largest, near ? cap : 0), Math.min(...plans.map(plan => plan.bytes)) * 0.9),
    series: [
      { name: "front", type: "line", step: "end", silent: true, symbol: "none", data: front.map(at => [plans[at].seconds, plans[at].bytes]), lineStyle: { color: report.colour("faint"), width: 2 }, itemStyle: { color: report.colour("faint") }, ...limit },
      ...groups.filter(({ data }) => data.length),
    ],
  };
};
report.plans.said = at => {
  const { name, seconds, bytes, reason, yours } = report.data.plans[at];
  const head = report.escape(yours ? name : `${at + 1}: ${name}`);
  return [`<b>${head}</b>`, `${report.time(seconds, "s")}, ${report.bytes(bytes)}`, report.escape(reason)].filter(Boolean).join("<br>");
};

// The steps of A and B, for the timelines; a step is absent where no plan is chosen or the page has no room for it.
report.plans.steps = () => (document.getElementById("timeline-A") ? ["A", "B"] : []).flatMap(letter => {
  const part = name => document.getElementById(`timeline-${letter}${name}`);
  const plan = report.data.plans[report.plans[letter]];
  const view = plan?.timeline;
  part("-title").hidden = part("-note").hidden = !plan;
  part("").hidden = part("-table").hidden = !view;
  report.drop(part(""));
  if (!plan) return [];
  part("-title").textContent = `${letter}: ${plan.name}, ${report.time(plan.seconds, "s")}`;
  part("-note").textContent = view ? view.note : "The step of this plan is not on the page: graphpp.html(plan.timeline()) draws it.";
  if (!view) return [];
  const body = part("-table").querySelector("tbody");
  body.textContent = "";
  report.rows(body, Array.from(report.column(view.busy), (time, rank) => [rank, report.time(time, view.unit), `${(100 - (100 * time) / view.makespan).toFixed(1)}%`]));
  return [{ id: `timeline-${letter}`, view: { ...view, name: letter } }];
});

report.plans.choose = (letter, at) => {
  report.plans[letter] = at;
  report.plans.update();
  if (document.getElementById("timeline")) report.timelines.show();
};

// Everything that depends on the plans that are shown and chosen.
report.plans.update = () => {
  for (const letter of ["A", "B"]) {
    const at = report.plans[letter];
    document.getElementById(`pair-${letter}`).value = at;
    for (const button of document.querySelectorAll(`[data-pick=${letter}]`)) {
      button.setAttribute("aria-pressed", String(Number(button.closest("tr").dataset.plan) === at));
    }
  }
  for (const { element, chart, option } of report.charts) {
    if (element.id === "plan-bars") chart.resize({ height: report.plans.height() });
    if (["plan-front", "plan-bars"].includes(element.id)) chart.setOption(option(), { notMerge: true });
  }
  report.plans.compare();
};

report.plans.start = () => {
  const { plans, compared } = report.data;
  report.plans.compared = JSON.parse(new TextDecoder().decode(report.column(compared)));
  report.plans.B = plans.findIndex((plan, at) => plan.yours && at > 0);
  if (report.plans.B < 0 && plans.length > 1) report.plans.B = 1;
  report.plans.filters();
  report.plans.filter();
  const chart = report.draw("plan-front", 400, report.plans.option);
  chart.on("click", ({ data, event }) => report.plans.choose(event.event.shiftKey ? "B" : "A", data.plan));
  if (document.getElementById("plan-bars")) report.draw("plan-bars", report.plans.height(), report.plans.bars);
  for (const button of document.querySelectorAll("[data-pick]")) {
    button.addEventListener("click", () => report.plans.choose(button.dataset.pick, Number(button.closest("tr").dataset.plan)));
  }
  for (const letter of ["A", "B"]) {
    document.getElementById(`pair-${letter}`).addEventListener("change", ({ target }) => report.plans.choose(letter, Number(target.value)));
  }
  report.plans.update();
};
