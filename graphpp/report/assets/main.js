// The order in which charts are drawn, and the controls of the whole page: theme, patterns, print.
"use strict";
report.applyTheme = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const chosen = document.getElementById("theme").value;
  document.documentElement.dataset.theme = report.printing ? "light" : chosen === "auto" ? (dark ? "dark" : "light") : chosen;
};

report.remember = value => {
  try {
    if (value === undefined) return localStorage.getItem("graphpp-theme");
    localStorage.setItem("graphpp-theme", value);
  } catch { /* a browser that keeps nothing for files */ }
  return null;
};

// Paper is white, and narrower than a window.
report.paper = 700; // pixels
report.print = printing => {
  if (printing === report.printing) return;
  report.printing = printing;
  report.applyTheme();
  report.resize(printing ? report.paper : 0);
  report.redraw();
};

report.controls = () => {
  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => { report.remember(theme.value); report.applyTheme(); report.redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { report.applyTheme(); report.redraw(); });
  const patterns = document.getElementById("patterns");
  report.patterns = patterns.checked;
  patterns.addEventListener("change", () => { report.patterns = patterns.checked; report.redraw(); });
  document.getElementById("print").addEventListener("click", () => window.print());
  matchMedia("print").addEventListener("change", ({ matches }) => report.print(matches));
  addEventListener("beforeprint", () => report.print(true));
  addEventListener("afterprint", () => report.print(false));
  addEventListener("resize", () => { if (!report.printing) report.resize(0); });
};

// One chart at a time, so that the first is there before the last.
report.start = async () => {
  const { data } = report;
  const parts = [
    [data.plans.length, report.plans.start],
    [document.getElementById("timeline"), report.timelines.start],
    [data.memory, report.memory.start],
    [data.stages.length, report.stageBars],
    [data.boundaries.length, report.boundaryBars],
    [data.losses.values.count, () => report.draw("run-losses", 300, report.curve(data.losses, loss => String(Number(loss.toPrecision(5))), "F"))],
    [data.seconds.values.count, () => report.draw("run-seconds", 300, report.curve(data.seconds, seconds => report.time(seconds, "s"), "I"))],
  ];
  await report.unpack();
  for (const [there, draw] of parts) {
    if (!there) continue;
    draw();
    document.documentElement.dataset.painted ??= String(Math.round(performance.now()));
    await new Promise(resolve => setTimeout(resolve));
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
};

document.getElementById("theme").value = ["light", "dark"].find(each => each === report.remember()) || "auto";
report.applyTheme();
report.controls();
if (typeof DecompressionStream === "undefined") {
  const notice = document.getElementById("old-browser");
  notice.hidden = false;
  notice.textContent = "This browser cannot unpack the data of the charts: take one of 2023 or later. The tables have the numbers.";
} else {
  report.start();
}
