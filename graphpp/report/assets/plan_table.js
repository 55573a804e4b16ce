// The table of plans: ordered by the head that was pressed, and filtered by its choices.
"use strict";
report.plans.most = 16; // values of a column that is a filter; more than one

// A select for each choice with few values.
report.plans.filters = () => {
  const form = document.getElementById("plan-filters");
  const colour = document.getElementById("plan-colour");
  for (const button of document.querySelectorAll("#plan-table [data-choice]")) {
    const name = button.dataset.sort;
    const values = report.plans.values(name);
    if (values.length < 2 || values.length > report.plans.most) continue;
    colour.append(new Option(name, name));
    const select = document.createElement("select");
    select.dataset.filter = name;
    const texts = report.plans.texts(name);
    select.append(new Option("any", ""), ...values.map((value, at) => new Option(texts.get(value), at)));
    const label = document.createElement("label");
    label.append(name, " ", select);
    document.getElementById("plan-choices").append(label);
  }
  colour.closest("label").hidden = !colour.options.length;
  report.plans.colour = colour.value;
  form.addEventListener("change", () => report.plans.filter(true));
  form.addEventListener("reset", () => setTimeout(() => report.plans.filter(true)));
  form.addEventListener("submit", event => event.preventDefault());
  for (const button of document.querySelectorAll("#plan-table [data-sort]")) {
    button.addEventListener("click", () => report.plans.sort(button));
  }
};

// The text of each value of a column, as the table has it.
report.plans.texts = name => {
  const heads = [...document.querySelectorAll("#plan-table thead th")];
  const column = heads.findIndex(head => head.querySelector("button")?.dataset.sort === name);
  const rows = [...document.querySelectorAll("#plan-table tbody tr")];
  return new Map(rows.map(row => [report.data.plans[Number(row.dataset.plan)].values[name], row.cells[column].textContent]));
};

report.plans.filter = changed => {
  const selects = [...document.querySelectorAll("#plan-filters [data-filter]")].filter(select => select.value !== "");
  const wanted = selects.map(select => [select.dataset.filter, report.plans.values(select.dataset.filter)[Number(select.value)]]);
  const [fits, front] = ["plan-fits", "plan-on-front"].map(id => document.getElementById(id).checked);
  const onFront = new Set(report.data.front);
  const rows = [...document.querySelectorAll("#plan-table tbody tr")];
  for (const row of rows) {
    const at = Number(row.dataset.plan);
    const plan = report.data.plans[at];
    row.hidden = !(wanted.every(([name, value]) => plan.values[name] === value) && (plan.fits || !fits) && (onFront.has(at) || !front));
  }
  report.plans.shown = rows.filter(row => !row.hidden).map(row => Number(row.dataset.plan));
  report.plans.colour = document.getElementById("plan-colour").value;
  const chosen = [...selects.map(select => `${select.dataset.filter} ${select.selectedOptions[0].text}`), ...(fits ? ["within the cap"] : []), ...(front ? ["on the front"] : [])];
  const count = document.getElementById("plan-count");
  count.textContent = chosen.length ? `${report.plans.shown.length} of ${rows.length} plans: ${chosen.join(", ")}` : `${rows.length} plans`;
  if (changed) report.plans.update();
};

// By the values of a column; a second press turns the order.
report.plans.sort = button => {
  const head = button.closest("th");
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const each of document.querySelectorAll("#plan-table th[aria-sort]")) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const name = button.dataset.sort;
  const value = row => {
    const plan = report.data.plans[Number(row.dataset.plan)];
    return name ? plan.values[name] : plan.yours ? -1 : Number(row.dataset.plan);
  };
  const body = document.querySelector("#plan-table tbody");
  const before = (one, other) => (typeof one === "number" ? one - other : one.localeCompare(other));
  body.append(...[...body.rows].sort((one, other) => (down ? -1 : 1) * before(value(one), value(other))));
  report.plans.filter(true);
};
