"use strict";
// Charts: Vega-Lite specifications, drawn by Vega-Embed as SVG when they come into view.

// Colours of the specifications are the page's own, which differ in light and dark.
const COLOURS = {
  "#D55E00": "var(--c0)", "#0072B2": "var(--c1)", "#009E73": "var(--c2)", "#CC79A7": "var(--c3)",
  "#E69F00": "var(--c4)", "#56B4E9": "var(--c5)", "#333333": "var(--ink)", "#999999": "var(--c7)",
};
const AXIS = {
  labelColor: "var(--soft)", titleColor: "var(--soft)", domainColor: "var(--line)", tickColor: "var(--line)",
  gridColor: "var(--line)", labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", labelLimit: 260, labelFlush: false,
};
const CONFIG = {
  background: "transparent", font: "system-ui, sans-serif", view: { stroke: "var(--line)" }, axis: AXIS,
  legend: {
    orient: "bottom", columns: 2, labelColor: "var(--ink)", titleColor: "var(--soft)", titleFontWeight: "normal",
    labelFontSize: 11, titleFontSize: 11, labelLimit: 260, symbolOpacity: 1,
  },
};
const tip = document.getElementById("tip");

function showTip(_, event, item, value) {
  if (!value) return (tip.style.display = "none");
  tip.textContent = value;
  tip.style.display = "block";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6)}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
}

// `ast` lets Vega interpret its expressions, which the page's policy would not let it compile.
function draw(figure) {
  const chart = figure.chart;
  waiting.delete(figure);
  inView.unobserve(figure);
  const text = JSON.stringify(chart.spec).replace(/#[0-9A-F]{6}/g, (colour) => COLOURS[colour] ?? colour);
  const options = { ast: true, renderer: "svg", actions: false, defaultStyle: false, config: CONFIG, tooltip: showTip };
  return vegaEmbed(figure.querySelector("div"), JSON.parse(text), options).catch((error) => {
    figure.append(`This chart cannot be drawn: ${error.message}`);
  });
}

const waiting = new Set();
const inView = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "400px" },
);

// Charts out of view are drawn when the browser has nothing else to do, so that all of them can be printed.
async function drawRest() {
  while (waiting.size) {
    await new Promise((done) => requestIdleCallback(done));
    if (waiting.size) await draw(waiting.values().next().value);
  }
}

function figure(chart) {
  const caption = element("figcaption", {}, chart.title, chart.note ? element("small", {}, chart.note) : null);
  const made = element("figure", { "aria-label": chart.title }, caption, element("div", {}));
  made.chart = chart;
  waiting.add(made);
  inView.observe(made);
  return made;
}
