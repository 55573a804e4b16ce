// The boxes of a timeline: a shape that draws all boxes of one rank, kind and colour at once, and the search for a box.
"use strict";
const MESSAGE = 5; // kinds from here on are sends, receives and collectives: a strip at the foot of the row
const STRIP = 0.8; // the top of that strip in the row
const THICK = 0.84; // the share of its band that a row fills

echarts.graphic.registerShape("actions", echarts.graphic.extendShape({
  buildPath: (context, shape) => {
    const boxes = shape.boxes;
    for (let at = 0; at < boxes.length; at += 4) context.rect(boxes[at], boxes[at + 1], boxes[at + 2], boxes[at + 3]);
  },
}));

// The columns of a timeline as typed arrays.
report.boxes = view => {
  const columns = Object.fromEntries(Object.entries(view.columns).map(([name, place]) => [name, report.column(place)]));
  const longest = view.rows.slice(1).map((end, rank) => {
    let most = 0;
    for (let at = view.rows[rank]; at < end; at++) most = Math.max(most, columns.duration[at]);
    return most;
  });
  return { ...columns, rows: view.rows, longest };
};

// The first box of a rank that may reach beyond `time`.
report.firstBox = (boxes, rank, time) => {
  let [low, high] = [boxes.rows[rank], boxes.rows[rank + 1]];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes.start[middle] < time - boxes.longest[rank]) low = middle + 1;
    else high = middle;
  }
  return low;
};

// Top and bottom of a box within its row, from 0 to 1.
report.lane = (boxes, at) =>
  boxes.kind[at] >= MESSAGE ? [STRIP, 1] : [boxes.lane[at] / boxes.lanes[at], (boxes.lane[at] + 1) / boxes.lanes[at]];

// The box at a time and a height within its row (0 to 1), or -1; messages lie over computations.
report.boxAt = (boxes, rank, time, height) => {
  let found = -1;
  for (let at = report.firstBox(boxes, rank, time); at < boxes.rows[rank + 1] && boxes.start[at] <= time; at++) {
    const [top, bottom] = report.lane(boxes, at);
    const hit = time <= boxes.start[at] + boxes.duration[at] && height >= top && height <= bottom;
    if (hit && (found < 0 || boxes.kind[at] >= boxes.kind[found])) found = at;
  }
  return found;
};

// The shapes of one rank's boxes of one kind, in the range of the chart that is shown. Neighbours closer than a quarter of a
// pixel are one rectangle, so a long step costs no more than the pixels that it fills.
report.rankShapes = (boxes, kind, rank, area, api, look) => {
  const [left, centre] = api.coord([0, rank]);
  const perTime = api.size([1, 0])[0];
  const height = api.size([0, 1])[1] * THICK;
  const top = centre - height / 2;
  const [first, last] = [area.x - left, area.x + area.width - left].map(x => x / perTime);
  const runs = new Map(); // colour and dimming -> flat list of boxes
  const texts = [];
  for (let at = report.firstBox(boxes, rank, first); at < boxes.rows[rank + 1] && boxes.start[at] <= last; at++) {
    if (boxes.kind[at] !== kind) continue;
    const [from, to] = report.lane(boxes, at);
    const x = left + boxes.start[at] * perTime;
    const width = boxes.duration[at] * perTime;
    const chosen = look.selected >= 0 && boxes.microbatch[at] === look.selected;
    const key = `${boxes.chunk[at]}/${look.selected >= 0 && !chosen ? "dim" : chosen ? "chosen" : "plain"}`;
    if (!runs.has(key)) runs.set(key, []);
    const run = runs.get(key);
    const end = run.length - 4;
    const y = top + from * height;
    if (end >= 0 && run[end + 1] === y && x - (run[end] + run[end + 2]) < 0.25 && width < 1.5) {
      run[end + 2] = Math.max(run[end + 2], x + width - run[end]);
      continue;
    }
    const shown = chosen ? Math.max(width, 3) : width; // a chosen box is never too thin to be seen
    run.push(x, y, shown > 4 ? shown - 0.8 : shown, (to - from) * height);
    const text = String(boxes.microbatch[at]);
    if (kind < MESSAGE && (to - from) * height >= 11 && width >= 7 * look.digits + 4) {
      const x0 = Math.max(x, area.x);
      const x1 = Math.min(x + width, area.x + area.width);
      const long = look.letter + text;
      const fits = x1 - x0 >= 7.5 * long.length + 4 ? long : x1 - x0 >= 7 * text.length + 2 ? text : "";
      if (fits) texts.push([(x0 + x1) / 2, y + ((to - from) * height) / 2, fits, key]);
    }
  }
  return { runs, texts, perTime, height };
};
