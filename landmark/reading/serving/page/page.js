// The page: documents, questions with their answers, and a source in its place. Its address says what is shown: #NAME is
// a document, #NAME:START-END a passage of it. Whatever comes from a document, a model or a file is set as text.

import { WrongKey, events, json, key, request } from "./server.js";

const AROUND = 3000; // characters of a text that are fetched before and after a passage
const $ = (selector) => document.querySelector(selector);
const make = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const wrong = (message) => make("p", { className: "error", role: "alert", textContent: message });
const number = (value) => value.toLocaleString("en-US");
// Lines that were cut at a width, as in plain text and in PDF, are joined; those of a table, a list or a poem are not.
const flowing = (text) => text.replace(/(?<=^[^\n\t]{45,100})\n(?=[\p{L}\p{N}"'“‘(_—–])/gmu, " ");
const say = (text) => ($("#said").textContent = text);

let documents = new Map(); // tokens, and warnings of what the file did not give, by name
const talks = new Map(); // by name of the document: turns, the element that shows them, and other documents
const TALKS = "landmark.talks"; // kept by this tab, so that a page that is loaded again shows them
const readings = new Map(); // texts that are being read, by name
const ASKED = 500; // milliseconds between two questions how far they are
let following = false; // whether the server is asked so
let shown = ""; // name of the document
let answering = null; // stops the answer that is being made
let wanted = 0; // sources of an answer; a model with landmarks finds none
let part = null; // of the text around a passage: name, start, end, length
let opened = ""; // the address of a passage

// --- The key ---

function askKey(error = "") {
  key.set("");
  showKey();
  $("#key-error").textContent = error;
  $("#key-field").value = "";
  if (!$("#key").open) $("#key").showModal();
}

const showKey = () => ($("#forget-key").textContent = key.get() ? "Forget the key" : "Enter the key");

$("#key form").addEventListener("submit", () => {
  key.set($("#key-field").value.trim());
  start();
});
$("#forget-key").addEventListener("click", () => {
  key.set("");
  talks.clear();
  location.href = location.pathname; // and nothing of that key is left here
});

// Shows an error: of a wrong key where it is asked for, others by `show`.
function failed(error, show) {
  if (error.name === "AbortError") return;
  if (error instanceof WrongKey) askKey(error.message);
  show(error.message);
}

// --- Documents ---

async function list() {
  const { data } = await json("documents");
  documents = new Map(data.map(({ id, tokens, warnings = [] }) => [id, { tokens, warnings }]));
  $("#documents").replaceChildren(...[...documents].map(([name, { tokens, warnings }]) => {
    const size = make("small", { textContent: `${number(tokens)} tokens` });
    const lacks = warnings.length ? [make("small", { className: "lacks", textContent: "not all of its text" })] : [];
    return make("li", {}, make("a", { href: `#${name}` }, make("span", { textContent: name }), size, ...lacks));
  }));
  mark();
}

function mark() {
  const isRead = [...readings.values()].some((one) => !one.failed);
  $("#welcome h1").textContent = isRead ? "It is being read" : documents.size ? "Choose a document" : "Put a book in";
  [$("#about").hidden, $("#meanwhile").hidden] = [isRead, !isRead];
  document.body.classList.toggle("empty", !documents.size && !readings.size);
  for (const link of document.querySelectorAll("#documents a, .sources a"))
    link.ariaCurrent = link.hash === (link.closest("nav") ? `#${shown}` : location.hash) ? "true" : null;
}

// A name that the server takes, and that no document has.
function freeName(file) {
  const [, stem, suffix] = file.normalize("NFKD").match(/^(.*?)(\.\w{1,8})?$/su);
  const dashed = stem.replace(/[\p{M}'’]/gu, "").replace(/[^A-Za-z0-9_.-]+/g, "-");
  const plain = dashed.replace(/^[^A-Za-z0-9]+|[-.]+$/g, "") || "document";
  const end = suffix?.replace(/[^A-Za-z0-9.]/g, "") ?? "";
  const taken = (name) => documents.has(name) || readings.has(name);
  for (let count = 1; ; count += 1) {
    const more = count > 1 ? `-${count}${end}` : end;
    const name = plain.slice(0, 64 - more.length) + more;
    if (!taken(name)) return name;
  }
}

// A text that is being read: what shows it, and when how much of it was read. isSent: the server has it.
function reading(name) {
  const line = make("small", { textContent: "The file is opened …" });
  const bar = make("progress", { ariaLabel: `${name}: how much is read` });
  const button = make("button", { type: "button", className: "quiet", textContent: "Stop" });
  const item = make("li", {}, make("span", { textContent: name }), bar, line, button);
  const one = { item, bar, line, button, seen: [], isSent: false };
  button.addEventListener("click", () => stopReading(name));
  readings.set(name, one);
  $("#readings").append(item);
  mark();
  say(`${name} is being read`);
  return one;
}

async function put(file, encoding = "") {
  const name = freeName(file.name), one = reading(name);
  one.stop = new AbortController();
  try {
    const options = { method: "PUT", body: file, signal: one.stop.signal };
    await request(`documents/${name}?${new URLSearchParams({ wait: false, ...(encoding && { encoding }) })}`, options);
    one.isSent = true;
    follow();
  } catch (error) {
    if (error.encodings) offer(one, file, error.encodings);
    else failed(error, (message) => unread(one, message));
    if (error.name === "AbortError") drop(name);
  }
}

function drop(name) {
  readings.get(name)?.item.remove();
  readings.delete(name);
  mark();
}

// Shows why a text is not read.
function unread(one, message) {
  one.failed = true;
  one.button.textContent = "Dismiss";
  one.bar.remove();
  one.line.replaceWith((one.line = wrong(message)));
  mark();
}

// Offers to read a file in the encodings in which it may be, each with a part of the text that it gives.
function offer(one, file, encodings) {
  const choices = encodings.map(({ name, sample }) => {
    const button = make("button", { type: "button", className: "quiet", textContent: `Read it as ${name}` });
    button.addEventListener("click", () => {
      drop([...readings].find(([, each]) => each === one)[0]);
      put(file, name);
    });
    return make("div", { className: "guess" }, make("q", { textContent: sample }), button);
  });
  unread(one, "It is not sure how this file writes its letters. Which of these is right?");
  one.line.after(...choices);
}

async function stopReading(name) {
  const { isSent, stop } = readings.get(name);
  stop?.abort();
  drop(name);
  if (isSent) await request(`readings/${name}`, { method: "DELETE" }).catch((error) => failed(error, say));
}

// Asks the server how far texts are read, until none is. They are read on while no page is open.
async function follow() {
  if (following) return;
  for (following = true; following; await new Promise((later) => setTimeout(later, ASKED))) {
    try {
      const sent = [...readings.keys()].filter((name) => readings.get(name).isSent);
      const { data } = await json("readings");
      for (const event of data) told(readings.get(event.id) ?? reading(event.id), event);
      const read = sent.filter((name) => readings.has(name) && !data.some(({ id }) => id === name));
      read.forEach(drop);
      if (read.length) await list();
      for (const name of read.filter((each) => documents.has(each))) {
        showOthers();
        say(`${name} is read`);
        if (!shown) location.hash = name;
      }
      following = [...readings.values()].some((one) => one.isSent && !one.failed);
    } catch (error) {
      if (error instanceof WrongKey) following = false;
      failed(error, (message) => readings.forEach((one) => (one.line.textContent = message)));
    }
  }
}

function told(one, { read, tokens, error }) {
  one.isSent = true;
  if (error && !one.failed) unread(one, error);
  if (error || !tokens) return;
  [one.bar.value, one.bar.max] = [read, tokens];
  one.line.textContent = progress(one.seen, { read, tokens });
}

// How far a text is read. seen: of the last ten times, when, and tokens that were read.
function progress(seen, { read, tokens }) {
  seen.push([performance.now() / 1000, read]);
  if (seen.length > 10) seen.shift();
  if (read === tokens) return `${number(tokens)} tokens are read; they are being saved`;
  const [[then, before], [now]] = [seen[0], seen.at(-1)], rate = (read - before) / (now - then);
  const pace = rate > 0 ? ` · ${number(Math.round(rate))} a second · ${duration((tokens - read) / rate)} left` : "";
  return `${number(read)} of ${number(tokens)} tokens${pace}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

async function putAll(files) {
  for (const file of files) await put(file); // the server reads one after the other
}

for (const button of document.querySelectorAll("[data-choose]")) button.addEventListener("click", () => $("#file").click());
$("#file").addEventListener("change", () => {
  putAll([...$("#file").files]);
  $("#file").value = "";
});
for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.toggle("dragging", kind === "dragover" || (kind === "dragleave" && event.relatedTarget !== null));
  if (kind === "drop") putAll([...event.dataTransfer.files]);
});

const askToDelete = (is) => {
  $("#delete").classList.toggle("sure", is);
  $("#delete").textContent = is ? "Delete it? It must be read again" : "Delete";
};
$("#delete").addEventListener("blur", () => askToDelete(false));
$("#delete").addEventListener("click", async ({ target }) => {
  const name = shown, isSure = target.classList.contains("sure");
  askToDelete(!isSure);
  if (!isSure) return;
  try {
    await request(`documents/${name}`, { method: "DELETE" });
    talks.delete(name);
    keep();
    location.hash = "";
    await list();
  } catch (error) {
    failed(error, (message) => talks.get(name)?.element.append(wrong(message)));
  }
});

// --- Questions ---

// Other documents that are asked together with this one, each as it was read alone.
function showOthers() {
  const talk = talks.get(shown), others = [...documents.keys()].filter((name) => name !== shown);
  $("#others").hidden = !talk || !others.length;
  if (!talk) return;
  const said = () => (talk.others.size ? `Asked together with ${[...talk.others].join(", ")}` : "Ask other documents too");
  $("#others summary").textContent = said();
  $("#others div").replaceChildren(...others.map((name) => {
    const box = make("input", { type: "checkbox", checked: talk.others.has(name) });
    box.addEventListener("change", () => {
      talk.others[box.checked ? "add" : "delete"](name);
      $("#others summary").textContent = said();
    });
    return make("label", {}, box, ` ${name}`);
  }));
}

// A conversation about a document, and what shows it.
function newTalk(name, turns = [], others = []) {
  const element = make("div", {});
  for (const turn of turns) element.append(ended(begun(turn), turn, name));
  talks.set(name, { turns, element, others: new Set(others) });
}

function keep() {
  const kept = [...talks].map(([name, { turns, others }]) => [name, turns, [...others]]);
  try {
    sessionStorage.setItem(TALKS, JSON.stringify(kept));
  } catch {} // there is no room: what was kept before stays
}

function restore() {
  const kept = talks.size ? [] : JSON.parse(sessionStorage.getItem(TALKS) ?? "[]");
  for (const [name, ...talk] of kept) if (documents.has(name)) newTalk(name, ...talk);
}

addEventListener("beforeunload", () => answering?.abort()); // else its connection is lost
addEventListener("pagehide", () => key.get() ? keep() : sessionStorage.removeItem(TALKS));

$("#anew").addEventListener("click", () => {
  answering?.abort();
  newTalk(shown, [], talks.get(shown).others);
  keep();
  $("#turns").replaceChildren(talks.get(shown).element);
  $("#anew").hidden = true;
  $("#question").focus();
});

// A question, and the places of its answer. turn: question, answer, reasoning, support, found, warned, isStopped, error.
function begun({ question, answer, reasoning }) {
  const thoughts = make("details", { hidden: !reasoning }, make("summary", { textContent: "Reasoning" }), make("p", {}, reasoning));
  return make("article", {}, make("h2", { textContent: question }), thoughts, make("div", { className: "answer" }, answer));
}

// What stands below an answer.
function ended(article, { question, answer, support, found, warned, isStopped, error }, name) {
  const place = article.querySelector(".answer");
  if (!answer && !isStopped && !error) place.append(make("span", { className: "dim", textContent: "The model ended without an answer." }));
  if (answer) article.append(asMarkdown(name, question, answer, support, found, warned));
  if (support) article.append(supported(support));
  if (found.length) article.append(sources(found, name));
  if (isStopped) article.append(make("p", { className: "dim", textContent: "Stopped." }));
  if (error) article.append(wrong(error));
  for (const line of warned) article.append(make("p", { className: "lacks", textContent: `Not in the text: ${line}` }));
  return article;
}

async function ask(question) {
  const talk = talks.get(shown), name = shown, stop = (answering = new AbortController());
  const turn = { question, answer: "", reasoning: "", support: null, found: [], warned: [], isStopped: true, error: "" };
  const status = make("p", { className: "dim", textContent: "The question is read …" });
  const article = begun(turn), [title, reasoning, answer] = article.children;
  title.after(status);
  talk.element.append(article);
  article.scrollIntoView({ block: "end" });
  const said = talk.turns.filter((each) => each.answer).flatMap((each) => [["user", each.question], ["assistant", each.answer]]);
  const messages = [...said, ["user", question]].map(([role, content]) => ({ role, content }));
  talk.turns.push(turn);
  $("#anew").hidden = false;
  busy(true);
  try {
    const alone = { sources: wanted, from_sources: wanted > 0 && $("#alone input").checked };
    const others = [...talk.others].filter((each) => documents.has(each));
    const about = others.length ? { documents: [name, ...others], documents_read: "apart" } : { document: name };
    const body = JSON.stringify({ ...about, messages, stream: true, ...alone });
    const options = { method: "POST", body, headers: { "Content-Type": "application/json" }, signal: stop.signal };
    for await (const event of events(await request("chat/completions", options))) {
      if (typeof event === "string") {
        const [, read, tokens] = event.match(/(\d+) of (\d+)/) ?? [];
        status.textContent = tokens ? `${number(+read)} of ${number(+tokens)} tokens are read …` : "Waiting …";
        continue;
      }
      turn.warned = event.warnings ?? turn.warned;
      const [{ delta = {}, finish_reason: finish, sources: found, support } = {}] = event.choices;
      const below = $("#turns").scrollHeight - $("#turns").scrollTop - $("#turns").clientHeight;
      if (delta.content || delta.reasoning_content) status.remove();
      if (delta.reasoning_content) reasoning.hidden = false;
      reasoning.lastChild.append(delta.reasoning_content ?? "");
      answer.append(delta.content ?? "");
      turn.reasoning += delta.reasoning_content ?? "";
      turn.answer += delta.content ?? "";
      if (finish && wanted) article.append(Object.assign(status, { textContent: "The passages are looked for …" }));
      [turn.found, turn.support] = [found ?? turn.found, support ?? turn.support];
      if (below < 40) article.scrollIntoView({ block: "end" });
    }
    turn.isStopped = false;
  } catch (error) {
    turn.isStopped = error.name === "AbortError";
    failed(error, (message) => (turn.error = message));
    if (!turn.answer && !$("#question").value) $("#question").value = question;
  }
  status.remove();
  ended(article, turn, name).scrollIntoView({ block: "end" });
  keep();
  answering = null;
  busy(false);
}

// How far the answer is in its passages.
function supported({ level, said }) {
  const mark = { clear: "●", weak: "◐", none: "○" }[level];
  return make("p", { className: `support ${level}`, textContent: `${mark} Is it in the text? ${said}` });
}

// Buttons that copy an answer, or save it, as Markdown with its passages and their places.
function asMarkdown(name, question, answer, support, found, warned) {
  const quoted = (text) => text.trim().split("\n").map((line) => `> ${line}`).join("\n");
  const passages = found.map(({ text, document, place }, at) => `${at + 1}. ${document || name}, ${place}\n\n${quoted(text)}`);
  const notes = [...(support ? [`Is it in the text? ${support.said}`] : []), ...warned.map((line) => `Not in the text: ${line}`)];
  const whole = [`# ${question}`, answer.trim(), ...notes, ...(passages.length ? ["## Passages", ...passages] : [])].join("\n\n") + "\n";
  const copy = make("button", { type: "button", className: "quiet", textContent: "Copy" });
  copy.addEventListener("click", () => navigator.clipboard.writeText(whole).then(() => say("Copied"), (error) => say(error.message)));
  const save = make("a", { className: "quiet", textContent: "Save", download: `${name}-answer.md` });
  save.href = URL.createObjectURL(new Blob([whole], { type: "text/markdown" }));
  return make("p", { className: "keep" }, copy, save);
}

function sources(found, name) {
  const items = found.map(({ text, document, place, start, end, share, kind }) => {
    const other = document && document !== name && documents.has(document) ? document : "";
    const said = { head: "the beginning", whole: "no passage was found, the whole text was read" }[kind];
    const where = other ? `${place} of ${other}` : place;
    const about = make("small", {}, make("b", { textContent: where }), ` · ${said ?? `${Math.round(100 * share)} %`}`);
    return make("li", {}, make("a", { href: `#${name}:${start}-${end}${other && `@${other}`}` }, about, make("span", { textContent: text })));
  });
  return make("section", { className: "sources" }, make("h3", { textContent: "Where it looked" }), make("ol", {}, ...items));
}

function busy(is) {
  const focused = [$("#send"), $("#stop")].includes(document.activeElement);
  [$("#send").hidden, $("#stop").hidden, $("#turns").ariaBusy] = [is, !is, String(is)];
  if (focused) (is ? $("#stop") : $("#question")).focus();
}

$("#ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("#question").value.trim();
  if (!question || answering) return;
  $("#question").value = "";
  ask(question);
});
$("#question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("#ask").requestSubmit();
});
$("#stop").addEventListener("click", () => answering?.abort());

// --- A source in its place ---

async function fetchText(name, start, end) {
  const found = await json(`documents/${name}/text?start=${Math.max(0, start)}&end=${end}`);
  return { ...found, letters: Array.from(flowing(found.text)) }; // places count whole characters, JavaScript's indices halves
}

async function showPassage(name, start, end) {
  const address = location.hash;
  $("#place").textContent = linkTo(address)?.querySelector("b").textContent ?? `Characters ${number(start)} to ${number(end)}`;
  $("#close").href = `#${shown}`;
  $("#passage").replaceChildren();
  try {
    const found = await fetchText(name, start - AROUND, end + AROUND);
    if (location.hash !== address) return; // another passage is shown
    const cut = (from, to) => found.letters.slice(from - found.start, to - found.start).join("");
    part = { name, start: found.start, end: found.end, length: found.length };
    const passage = make("mark", { textContent: cut(start, end) });
    $("#passage").replaceChildren(cut(found.start, start), passage, cut(end, found.end));
    passage.scrollIntoView({ block: "center" });
  } catch (error) {
    part = null;
    failed(error, (message) => $("#passage").replaceChildren(wrong(message)));
  }
  limits();
  $("#place").focus();
}

const linkTo = (address) => [...document.querySelectorAll(".sources a")].findLast((link) => link.hash === address);
const limits = () => ([$("#earlier").hidden, $("#later").hidden] = [!part || part.start === 0, !part || part.end === part.length]);

async function more(later) {
  const { name, start, end } = part, text = $("#text"), height = text.scrollHeight;
  const found = await (later ? fetchText(name, end, end + AROUND) : fetchText(name, start - AROUND, start));
  if (part.name !== name || part.start !== start || part.end !== end) return; // another passage is shown
  part = { ...part, start: Math.min(start, found.start), end: Math.max(end, found.end) };
  $("#passage")[later ? "append" : "prepend"](found.letters.join(""));
  limits();
  if (!later) text.scrollTop += text.scrollHeight - height;
}

for (const id of ["earlier", "later"])
  $(`#${id}`).addEventListener("click", () => more(id === "later").catch((error) => failed(error, say)));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("#source").hidden && !$("#key").open) location.hash = shown;
});

// --- What is shown ---

function route() {
  const [, name = "", start, end, other] = location.hash.match(/^#([\w.-]+)(?::(\d+)-(\d+)(?:@([\w.-]+))?)?$/) ?? [];
  const isPassage = start !== undefined, isOther = shown !== name;
  if (isOther) {
    answering?.abort();
    shown = name;
    if (name && !talks.has(name)) newTalk(name);
    askToDelete(false);
    $("#talk h1").textContent = name;
    $("#turns").replaceChildren(...(name ? [talks.get(name).element] : []));
    talks.get(name)?.element.lastElementChild?.scrollIntoView({ block: "end" });
  }
  $("#tokens").textContent = documents.has(name) ? `${number(documents.get(name).tokens)} tokens` : "";
  $("#lacks").replaceChildren(...(documents.get(name)?.warnings ?? []).map((line) => make("p", { textContent: line })));
  document.title = name ? `${name} – Ask a book` : "Ask a book";
  [$("#welcome").hidden, $("#talk").hidden, $("#source").hidden] = [Boolean(name), !name, !isPassage];
  document.body.dataset.view = isPassage ? "source" : name ? "talk" : "shelf";
  mark();
  $("#anew").hidden = !talks.get(name)?.turns.length;
  showOthers();
  if (isPassage) showPassage(other ?? name, Number(start), Number(end));
  else if (isOther && name) $(matchMedia("(max-width: 52rem)").matches ? "#talk h1" : "#question").focus(); // no phone's keyboard
  else linkTo(opened)?.focus();
  opened = isPassage ? location.hash : "";
}

async function start() {
  const [, given] = location.hash.match(/^#key=([\w.~-]+)$/) ?? []; // of the address that the server has printed
  if (given) {
    key.set(given);
    history.replaceState(null, "", location.pathname);
  }
  showKey();
  if (!key.get()) return askKey();
  try {
    const [model] = (await json("models")).data;
    $("#model").textContent = model.id;
    wanted = model.sources ? 3 : 0;
    $("#alone").hidden = !wanted;
    $("#failed").textContent = "";
    await list();
    restore();
    route();
    follow();
  } catch (error) {
    failed(error, (message) => ($("#failed").textContent = message));
  }
}

addEventListener("hashchange", () => (location.hash.startsWith("#key=") ? start() : route()));
start();
