const content = JSON.parse(document.getElementById("content").textContent);

// Everything becomes text: nothing of a record is ever taken for HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// ---- tables

// The number that a cell begins with; null without one.
function number(text) {
  const found = /^[-+−]?[\d,]*\.?\d+(e[-+]?\d+)?/i.exec(text.trim());
  return found ? Number(found[0].replaceAll(",", "").replace("−", "-")) : null;
}

function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (x !== null && y !== null) return x - y || a.localeCompare(b);
  if (x !== null || y !== null) return x === null ? 1 : -1;
  return a.localeCompare(b, undefined, { numeric: true });
}

// Each row is a body of its own, with where it comes from below it: they stay together when they are sorted.
function table(columns, rows, words, look = null) {
  const bodies = rows.map((row) => body(row, words));
  const heads = columns.map(({ title, tooltip }, at) => {
    const press = element("button", { type: "button", onclick: () => sort(at) }, title);
    const kind = words.includes(at) ? "words" : null;
    return element("th", { scope: "col", "aria-sort": "none", class: kind, title: tooltip }, press);
  });
  const made = element("table", { class: look }, element("thead", {}, element("tr", {}, ...heads)), ...bodies);

  function sort(at) {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[heads[at].ariaSort];
    heads.forEach((head) => (head.ariaSort = "none"));
    heads[at].ariaSort = next;
    const ordered = bodies.map((each, place) => [rows[place].cells[at], each]);
    if (next !== "none") {
      const isBlank = (text) => text === "-" || text === "";
      ordered.sort(([a], [b]) => {
        if (isBlank(a) || isBlank(b)) return isBlank(a) - isBlank(b);
        return next === "ascending" ? compare(a, b) : compare(b, a);
      });
    }
    made.append(...ordered.map(([, each]) => each));
  }

  const count = element("span", { class: "few", role: "status" }, `${rows.length} rows`);
  const texts = rows.map((row) => row.cells.join(" ").toLowerCase());
  const filter = element("input", {
    type: "search",
    placeholder: "filter, as: landmark 2048",
    "aria-label": "filter rows",
    oninput: () => {
      const asked = filter.value.toLowerCase().split(/\s+/);
      bodies.forEach((each, at) => (each.hidden = !asked.every((word) => texts[at].includes(word))));
      const shown = bodies.filter((each) => !each.hidden).length;
      count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
    },
  });
  return [element("div", { class: "tools" }, filter, count), element("div", { class: "scroll" }, made)];
}

function body(row, words) {
  const cells = row.cells.map((text, at) => {
    const kind = words.includes(at) ? "words" : null;
    if (at > 0) return element("td", { class: kind }, text);
    const name = row.link ? element("a", { href: row.link }, text) : text;
    return element("th", { scope: "row", class: "words" }, row.source ? opener(text) : null, name);
  });
  const made = element("tbody", {}, element("tr", {}, ...cells));

  function opener(name) {
    const press = element("button", {
      type: "button", class: "more", "aria-expanded": "false", "aria-label": `where ${name} comes from`,
      onclick: () => {
        const open = made.rows.length === 1;
        press.ariaExpanded = String(open);
        if (open) made.append(source(row.source, cells.length));
        else made.rows[1].remove();
      },
    });
    return press;
  }
  return made;
}

function source({ command: how, ...rest }, width) {
  const list = Object.entries(rest).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  return element("tr", { class: "source" }, element("td", { colspan: width }, command(how), element("dl", {}, ...list)));
}

function command(text) {
  const press = element("button", { type: "button", class: "copy", onclick: () => copy(text, press) }, "copy");
  return element("div", { class: "command" }, press, element("code", {}, text));
}

async function copy(text, press) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", {});
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy"); // where a page from a file may not use the clipboard
    field.remove();
  }
  press.textContent = "copied";
  setTimeout(() => (press.textContent = "copy"), 1500);
}

// ---- the page

function section(one) {
  const { charts, more = [] } = one;
  const parts = [
    element("h2", {}, one.title),
    element("p", { class: "settings" }, one.header ?? one.settings),
    one.claim ? element("p", { class: "claim" }, one.claim) : null,
  ];
  if (one.comparisons?.length) {
    parts.push(element("ul", {}, ...one.comparisons.map(({ text, verdict }) => element("li", { class: verdict }, text))));
  }
  if (one.columns) parts.push(...table(one.columns, one.rows, [0, 1]));
  if (one.notes?.length) parts.push(element("ul", {}, ...one.notes.map((text) => element("li", {}, text))));
  if (one.missing.length) {
    const told = `${one.missing.length} of ${one.total} rows have no record yet: ${one.missing.join(", ")}. This makes them:`;
    parts.push(element("p", { class: "few" }, told), command(one.rest));
  }
  if (charts.length) parts.push(element("div", { class: "charts" }, ...charts.map(figure)));
  if (more.length) {
    const curves = element("div", { class: "charts" }, ...more.map(figure));
    parts.push(element("details", {}, element("summary", {}, `Curves by position and of the trainings (${more.length})`), curves));
  }
  return element("section", { id: one.id }, ...parts);
}

const EXPLAINED =
  "For each experiment one row: the paper's best with landmarks where it prints any, else ours, and its change of perplexity from another; " +
  "or the longest prompts of which most were answered. A difference counts as shown (✓) past two standard errors, " +
  "as not shown (✗) within them, or the opposite is shown (‼). ▸ opens where a number comes from.";

function overview() {
  const rows = content.sections.filter((one) => one.name !== "other").map((one) => {
    const told = (one.comparisons ?? []).filter(({ verdict }) => verdict !== "unknown");
    const yes = told.filter(({ verdict }) => verdict === "yes").length;
    const shown = told.length ? `${yes} of ${told.length}` : "-";
    const [row, ours, theirs] = one.headline;
    const done = `${one.done} of ${one.total}`;
    return { cells: [one.title, row, ours, theirs, shown, done, one.settings], link: `#${one.id}` };
  });
  const columns = ["experiment", "row", "ours", "paper", "differences shown", "rows done", "settings"];
  return element(
    "section", { id: "overview" }, element("h2", {}, "Overview"),
    element("p", { class: "few" }, EXPLAINED),
    ...table(columns.map((title) => ({ title })), rows, [0, 1, 6], "wrap"),
    element("div", { class: "charts" }, ...content.charts.map(figure)),
  );
}

function theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => (root.dataset.theme = name);
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  if (stored()) set(stored());
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    set(now === "dark" ? "light" : "dark");
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it lasts until the page is closed */ }
  });
}

theme();
const { runs, rows: made } = content.counts;
document.getElementById("made").textContent =
  `${runs} runs, ${made} rows · made ${content.made.replace("T", " ").replace("+00:00", " UTC")} at commit ${content.commit}`;
document.querySelector("nav").append(
  element("a", { href: "#overview" }, "Overview"),
  ...content.sections
    .filter((one, at, all) => all.findIndex((each) => each.name === one.name) === at)
    .map((one) => element("a", { href: `#${one.id}`, title: one.title }, one.name)),
);
document.querySelector("main").replaceChildren(
  ...content.problems.map((text) => element("p", { class: "problem" }, text)),
  overview(),
  ...content.sections.map(section),
);
addEventListener("load", drawRest);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
