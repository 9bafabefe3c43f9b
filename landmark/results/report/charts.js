"use strict";
// Charts as SVG, drawn anew for the width that they are shown in.

function shape(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

const MARKS = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
  hollow: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
  up: (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
  down: (r) => `M0,${1.2 * r}L${1.2 * r},${-r}H${-1.2 * r}z`,
  plus: (r) => `M${-1.2 * r},0H${1.2 * r}M0,${-1.2 * r}V${1.2 * r}`,
};
const DASHES = ["none", "6 3", "2 3", "8 3 2 3"];

const colour = (series) => (series.colour < 0 ? "var(--ink)" : `var(--c${series.colour % 8})`);
const dash = (series) => DASHES[(series.dash ? 1 : Math.floor(Math.max(0, series.colour) / 8)) % DASHES.length];

function mark(series, x, y, r = 3.6) {
  const kind = Object.keys(MARKS)[series.mark % 8];
  const open = ["hollow", "cross", "plus"].includes(kind);
  return shape("path", {
    d: MARKS[kind](kind === "hollow" ? r + 1.4 : r), transform: `translate(${x},${y})`,
    fill: open ? "none" : colour(series), stroke: colour(series), "stroke-width": open ? 1.6 : 0.5,
  });
}

function say(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 65536 && value % 1024 === 0) return value % 1048576 ? `${value / 1024}K` : `${value / 1048576}M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size < 0.01 ? 2 : 4))).replace("-", "−");
}

// Positions of values between two pixels, and the values worth a tick.
function scale(axis, values, from, to, apart = 70) {
  let low = Math.min(...values), high = Math.max(...values);
  if (axis.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (axis.range) [low, high] = axis.range;
  if (low === high) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  const t = axis.threshold;
  const way = { log: Math.log2, symlog: (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / t) }[axis.scale] ?? ((v) => v);
  const [a, b] = [way(low), way(high)], pad = 0.045 * (b - a);
  const place = (v) => from + ((way(v) - a + pad) / (b - a + 2 * pad)) * (to - from);
  let ticks = [];
  if (axis.scale === "log") {
    const each = [...new Set(values)].sort((x, y) => x - y);
    const few = Math.abs(to - from) / 46;
    for (let p = Math.ceil(Math.log2(low)); p <= Math.log2(high); p++) ticks.push(2 ** p);
    if (axis.each && each.length <= few) ticks = each;
    while (ticks.length > few) ticks = ticks.filter((_, at) => at % 2 === 0);
    ticks = ticks.filter((v, at) => !at || Math.abs(place(v) - place(ticks[at - 1])) > 26);
  } else if (axis.scale === "symlog") {
    for (let size = t; size <= Math.max(high, -low); size *= 10) ticks.push(size, -size);
    ticks = [0, ...ticks].filter((v) => v >= low && v <= high);
  } else {
    const rough = (high - low) / Math.max(2, Math.abs(to - from) / apart);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * step; v += step) ticks.push(Number(v.toPrecision(12)));
  }
  return { place, ticks, low, high };
}

function around(value, low, high) {
  return high > low ? `${say(value)} (${say(low)} to ${say(high)})` : say(value);
}

function drawLines(chart, series, width, svg) {
  const box = { left: 54, right: width - 8, top: 10, bottom: 256 };
  const points = series.flatMap((each) => each.points);
  let shown = points.flatMap(([, y, low, high]) => [y, low, high]).concat((chart.levels ?? []).map(([, y]) => y));
  const above = series.filter((each) => chart.y.top && each.points.some(([, y]) => y > chart.y.top));
  const inside = shown.filter((value) => !chart.y.top || value <= chart.y.top);
  if (above.length && inside.length) shown = inside;
  const x = scale(chart.x, points.map(([at]) => at), box.left, box.right);
  const y = scale(chart.y, shown, box.bottom, box.top, 38);
  axes(svg, chart, x, y, box);
  const clip = `clip${chart.id}`;
  svg.append(shape("clipPath", { id: clip }), shape("g", { "clip-path": `url(#${clip})` }));
  svg.querySelector("clipPath").append(shape("rect", { x: box.left, y: box.top - 5, width: box.right - box.left + 6, height: box.bottom - box.top + 8 }));
  const inner = svg.lastChild, hits = [];
  if (chart.diagonal) {
    const ends = [Math.max(x.low, y.low), Math.min(x.high, y.high)];
    inner.append(shape("line", { class: "level", x1: x.place(ends[0]), y1: y.place(ends[0]), x2: x.place(ends[1]), y2: y.place(ends[1]) }));
  }
  for (const [name, value] of chart.levels ?? []) {
    inner.append(shape("line", { class: "level", x1: box.left, x2: box.right, y1: y.place(value), y2: y.place(value) }));
    svg.append(shape("text", { x: box.right, y: y.place(value) - 4, "text-anchor": "end" }, `${name} ${say(value)}`));
  }
  for (const each of series) {
    const path = each.points.map(([at, value]) => `${x.place(at).toFixed(1)},${y.place(value).toFixed(1)}`);
    const look = { fill: "none", stroke: colour(each), "stroke-width": 1.6, "stroke-dasharray": dash(each) };
    if (each.line) inner.append(shape("polyline", { points: path.join(" "), ...look }));
    for (const [at, value, low, high, name] of each.points) {
      const [px, py] = [x.place(at), y.place(value)];
      if (high > low) inner.append(shape("path", { d: `M${px},${y.place(low)}V${y.place(high)}M${px - 3},${y.place(low)}h6M${px - 3},${y.place(high)}h6`, stroke: colour(each), fill: "none" }));
      if (each.mark !== null) inner.append(mark(each, px, py));
      if (py >= box.top - 5) hits.push([px, py, `${[each.name, name].filter(Boolean).join(", ")}\n${say(at)}: ${around(value, low, high)}`]);
    }
  }
  if (above.length && inside.length && !chart.y.quiet) {
    svg.append(shape("text", { x: box.right, y: box.top + 6, "text-anchor": "end" }, `above: ${above.map((each) => each.name).join(", ")}`.slice(0, Math.floor(width / 6.5))));
  }
  return [box.bottom + 50, hits];
}

function axes(svg, chart, x, y, box) {
  for (const value of y.ticks) {
    svg.append(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: y.place(value), y2: y.place(value) }));
    svg.append(shape("text", { x: box.left - 6, y: y.place(value) + 4, "text-anchor": "end" }, say(value)));
  }
  below(svg, chart.x.title, x, box);
  svg.append(shape("text", { transform: `translate(11,${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y.title));
}

function below(svg, title, x, box) {
  for (const value of x.ticks) {
    svg.append(shape("line", { class: "grid", x1: x.place(value), x2: x.place(value), y1: box.top, y2: box.bottom }));
    svg.append(shape("text", { x: x.place(value), y: box.bottom + 16, "text-anchor": "middle" }, say(value)));
  }
  caption(svg, title, (box.left + box.right) / 2, box.bottom + 34, box.right - box.left);
}

// Words of a title in one line, or in two where it is longer than what it stands below.
function caption(svg, title, x, y, width) {
  const words = title.split(" "), half = words.findIndex((_, at) => words.slice(0, at + 1).join(" ").length > title.length / 2);
  const lines = 5.6 * title.length > width ? [words.slice(0, half + 1), words.slice(half + 1)] : [words];
  lines.forEach((line, at) => svg.append(shape("text", { x, y: y + 14 * at, "text-anchor": "middle" }, line.join(" "))));
}

function drawDots(chart, series, width, svg) {
  const room = Math.floor((0.42 * width) / 6.2), each = 21;
  const left = 10 + 6.2 * Math.min(room, Math.max(...chart.names.map((name) => name.length)));
  const box = { left, right: width - 10, top: 4, bottom: 8 + each * chart.names.length };
  const x = scale(chart.x, series.flatMap(({ points }) => points.flatMap((point) => point.slice(1))), box.left, box.right);
  below(svg, chart.x.title, x, box);
  const hits = [], middle = (at) => box.top + each * (at + 0.5);
  chart.names.forEach((name, at) => {
    const text = name.length > room ? `${name.slice(0, room - 1)}…` : name;
    svg.append(shape("text", { class: "name", x: box.left - 8, y: middle(at) + 4, "text-anchor": "end" }, text));
  });
  for (const one of series) {
    for (const [at, value, low, high] of one.points) {
      const [px, py] = [x.place(value), middle(at)];
      if (high > low) svg.append(shape("path", { d: `M${x.place(low)},${py}H${x.place(high)}M${x.place(low)},${py - 3}v6M${x.place(high)},${py - 3}v6`, stroke: colour(one), fill: "none" }));
      svg.append(mark(one, px, py));
      hits.push([px, py, `${chart.names[at]}, ${one.name}\n${around(value, low, high)}`]);
    }
  }
  return [box.bottom + 52, hits];
}

function drawHeat(chart, _, width, svg) {
  const rows = chart.y.values, columns = chart.x.values, tall = 30;
  const left = 30 + 6.4 * Math.max(...rows.map((name) => name.length));
  const wide = (width - left - 6) / columns.length, bottom = 8 + tall * rows.length;
  const known = chart.cells.flat().filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)], hits = [];
  rows.forEach((name, row) => {
    const y = bottom - tall * (row + 1);
    svg.append(shape("text", { class: "name", x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, name));
    columns.forEach((column, at) => {
      const value = chart.cells[row][at], x = left + wide * at;
      if (value === null) {
        if (wide > 44) svg.append(shape("text", { x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, "missing"));
        return;
      }
      const share = high > low ? (value - low) / (high - low) : 0.5;
      const cell = shape("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(1, wide - 1), height: tall - 1, rx: 2 });
      cell.style.fill = `color-mix(in oklab, var(--high) ${(100 * share).toFixed(1)}%, var(--low))`;
      svg.append(cell);
      if (wide > 7.5 * Math.max(4, high.toFixed(chart.digits).length)) {
        const text = shape("text", { x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, value.toFixed(chart.digits));
        text.style.fill = share > 0.7 ? "var(--paper)" : "var(--ink)";
        svg.append(text);
      }
      hits.push([x + wide / 2, y + tall / 2, `${[chart.y.title, name].join(" ")}, ${[chart.x.title, column].join(" ").trim()}\n${say(Number(value.toPrecision(6)))}`]);
    });
  });
  const every = Math.ceil(columns.length / Math.max(1, (width - left) / (12 + 6.4 * Math.max(...columns.map((name) => name.length)))));
  columns.forEach((name, at) => {
    if (at % every === 0) svg.append(shape("text", { class: "name", x: left + wide * (at + 0.5), y: bottom + 16, "text-anchor": "middle" }, name));
  });
  svg.append(shape("text", { x: left + (width - left) / 2, y: bottom + 34, "text-anchor": "middle" }, chart.x.title));
  svg.append(shape("text", { transform: `translate(11,${bottom / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y.title));
  return [bottom + 40, hits];
}

const DRAWN = { lines: drawLines, dots: drawDots, heat: drawHeat };
const tip = document.getElementById("tip");
let charts = 0;

function figure(chart) {
  chart.id = ++charts;
  const all = chart.series ?? [], off = new Set();
  const svg = shape("svg", { role: "img", "aria-label": chart.title });
  let hits = [], drawn = 0;

  function draw(width) {
    drawn = width;
    svg.replaceChildren();
    const shown = all.filter((each) => !off.has(each));
    const [height, found] = all.length && !shown.length ? [60, []] : DRAWN[chart.kind](chart, shown, width, svg);
    hits = found;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  svg.addEventListener("pointermove", (event) => {
    const at = svg.getBoundingClientRect(), zoom = drawn / at.width;
    const [px, py] = [(event.clientX - at.left) * zoom, (event.clientY - at.top) * zoom];
    const far = ([x, y]) => (x - px) ** 2 + (y - py) ** 2;
    const near = hits.reduce((best, hit) => (far(hit) < far(best) ? hit : best), [1e9, 1e9, ""]);
    if (far(near) > 30 ** 2) return (tip.style.display = "none");
    tip.textContent = near[2];
    tip.style.display = "block";
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6)}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
  });
  svg.addEventListener("pointerleave", () => (tip.style.display = "none"));

  const legend = all.length < 2 ? [] : all.map((each) => {
    const look = shape("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" });
    if (each.line) look.append(shape("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: colour(each), "stroke-width": 1.6, "stroke-dasharray": dash(each) }));
    if (each.mark !== null) look.append(mark(each, 11, 6));
    const press = element("button", { type: "button", "aria-pressed": "true", onclick: () => {
      off.delete(each) || off.add(each);
      press.ariaPressed = String(!off.has(each));
      draw(drawn);
    } }, look, each.name);
    return press;
  });
  const made = element("figure", {}, element("figcaption", {}, chart.title), svg, element("div", { class: "legend" }, ...legend));
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width > 0 && width !== drawn) draw(width);
  }).observe(made);
  return made;
}
