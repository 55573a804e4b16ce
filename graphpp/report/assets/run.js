// The run so far: losses and seconds of steps.
"use strict";
report.curve = ({ every, values }, spell, look) => common => {
  const numbers = report.column(values);
  return {
    legend: { show: false },
    tooltip: { ...common.tooltip, trigger: "axis", formatter: ([item]) => `step ${item.value[0]}<br><b>${Number.isFinite(item.value[1]) ? spell(item.value[1]) : "not finite"}</b>` },
    grid: { left: 84, right: 20, top: 16, bottom: 76 },
    xAxis: report.axis({ axis: { type: "value", min: every, max: Math.max(every * numbers.length, every + 1), minInterval: 1, name: "step", nameLocation: "middle", nameGap: 24 } }),
    yAxis: report.axis({ lines: true, label: { formatter: spell }, axis: { type: "value", scale: true, splitNumber: 4 } }),
    dataZoom: [
      { type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      { ...report.slider(6), filterMode: "none", labelFormatter: step => String(Math.round(step)) },
    ],
    series: [{
      type: "line", symbol: "circle", showSymbol: numbers.length <= 100, symbolSize: 4, sampling: "lttb", connectNulls: false,
      lineStyle: { color: report.colour(look), width: 1.5 }, itemStyle: { color: report.colour(look) },
      data: Array.from(numbers, (value, at) => [every * (at + 1), Number.isFinite(value) ? value : null]),
    }],
  };
};
