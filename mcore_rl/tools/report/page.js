"use strict";
// Draws the report. All texts of a run become text nodes: none is read as HTML.

// shown: the variant that was chosen, by the id of its figure. hidden: runs, and labels of a figure, that are not drawn.
const state = { data: null, version: null, shown: {}, hidden: new Set(), sample: { run: 0, source: "", sort: "order", at: 0, label: "" } };
const isLive = !document.getElementById("data").textContent;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function setStatus(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.hidden = !text;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  return value && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}

// Plots

function getStyle() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(name).trim();
}

function isNarrow() { return window.matchMedia("(max-width: 46rem)").matches; }

function buildLayout(layout, data) {
  const get = getStyle();
  const axis = { gridcolor: get("--grid"), linecolor: get("--line"), zerolinecolor: get("--line"), automargin: true, exponentformat: "e", minexponent: 4 };
  const steps = layout.xaxis.title.text === "step" ? data.flatMap((trace) => trace.x) : [];
  const isShort = steps.length && Math.max(...steps) - Math.min(...steps) <= 10; // no tick at half a step
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: get("--text"), size: 12, family: "system-ui, sans-serif" },
    margin: { l: 8, r: 16, t: 8, b: 8 },
    xaxis: { ...axis, ...(isShort ? { dtick: 1 } : {}), ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis, title: { ...layout.yaxis.title, standoff: 6 } }, // beside long numbers
    hoverlabel: { namelength: -1 }, showlegend: false, // legends are beside the plots, which keep their height
    modebar: { bgcolor: "rgba(0,0,0,0)", color: get("--dim"), activecolor: get("--accent") },
  };
}

// Legends: of the runs one of the page, of other labels one of a plot

function makeSwatch(color, dash, { pattern, symbol } = {}) {
  if (symbol) return make("i", { class: "mark", "data-symbol": symbol.startsWith("line") ? "|" : "◇" });
  if (!dash) return make("i", { class: "swatch", style: `background-color: ${color}`, "data-pattern": pattern?.shape || null });
  const line = { solid: "", dash: "7 3", dot: "2 2", dashdot: "7 2 2 2", longdash: "10 3", longdashdot: "10 2 2 2" }[dash];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [name, value] of [["viewBox", "0 0 24 8"], ["width", 24], ["height", 8], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  for (const [name, value] of [["d", "M0 4H24"], ["stroke", color], ["stroke-width", 2], ["stroke-dasharray", line]]) path.setAttribute(name, value);
  svg.append(path);
  return svg;
}

function fillLegend(box, entries, redraw) { // entries: label, key in state.hidden, swatch
  const buttons = [...box.children];
  if (buttons.length !== entries.length || entries.some(([label], index) => buttons[index].textContent !== label)) {
    box.replaceChildren(...entries.map(([label, key, swatch]) =>
      make("button", { type: "button", onclick: () => { if (!state.hidden.delete(key)) state.hidden.add(key); redraw(); } }, swatch, label)));
  }
  entries.forEach(([, key], index) => box.children[index].setAttribute("aria-pressed", String(!state.hidden.has(key))));
  box.hidden = entries.length < 2;
}

function fillRunsLegend() {
  const { runs, colors, figures } = state.data;
  const entries = runs.map((run, index) => [run.run, "run " + run.run, makeSwatch(colors[index])]);
  fillLegend(document.getElementById("legend"), entries, () => { fillRunsLegend(); figures.forEach(drawFigure); });
}

function fillPlotLegend(figure, data) {
  const byLabel = new Map(data.filter((trace) => trace.meta?.label).map((trace) => [trace.meta.label, trace]));
  const isOfRuns = state.data.runs.length > 1;
  const entries = [...byLabel].map(([label, { line, marker }]) => [label, `${figure.id} ${label}`,
    line ? makeSwatch(isOfRuns ? "currentColor" : line.color, line.dash) : makeSwatch(marker.color, "", marker)]);
  fillLegend(document.getElementById("legend-" + figure.id), entries, () => drawFigure(figure));
}

function isDrawn(figure, { meta }) {
  return !state.hidden.has("run " + meta?.run) && !state.hidden.has(`${figure.id} ${meta?.label}`);
}

function listVariants(figure) { // and the index of the shown one; newer data may have left out the chosen one
  const chosen = state.shown[figure.id];
  const index = figure.variants.findIndex((variant) => variant.label === chosen?.label);
  if (chosen && index < 0) return [[...figure.variants, chosen], figure.variants.length];
  return [figure.variants, Math.max(index, 0)];
}

function drawFigure(figure) {
  const [variants, shown] = listVariants(figure), variant = variants[shown];
  const plot = document.getElementById("plot-" + figure.id);
  const data = structuredClone(variant.data).map((trace) => ({ ...trace, visible: isDrawn(figure, trace) }));
  for (const trace of data) if (trace.colorbar) Object.assign(trace.colorbar, { thickness: 12, title: { ...trace.colorbar.title, side: "right" } });
  for (const trace of data) if (trace.marker?.symbol) trace.marker.color = getStyle()("--text");
  const layout = buildLayout(structuredClone(variant.layout), variant.data);
  const rows = layout.yaxis.type === "category" ? new Set(data.flatMap((trace) => trace.y)).size : 0;
  if (rows && isNarrow()) { // long labels leave no room for what they are of
    const labels = [...new Set(data.flatMap((trace) => trace.y))];
    Object.assign(layout.yaxis, { tickmode: "array", tickvals: labels, ticktext: labels.map((label) => label.replace(/([:,]) /g, "$1<br>")) });
  }
  plot.style.height = rows > 8 ? `${rows * 22 + 100}px` : "";
  fillPlotLegend(figure, variant.data);
  fillNumbers(document.getElementById("numbers-" + figure.id), variant.data);
  const config = { responsive: true, displaylogo: false, displayModeBar: isNarrow() ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  return Plotly.react(plot, data, layout, config).then(() => { if (plot.offsetHeight !== plot.firstChild.offsetHeight) return Plotly.Plots.resize(plot); });
}

function plain(text) { return new DOMParser().parseFromString(text, "text/html").documentElement.textContent; }

function fillNumbers(details, traces) {
  const fill = () => {
    if (!details.open) return;
    const rows = [["", "last", "lowest", "highest"]];
    for (const trace of traces) {
      const values = (trace.z ? trace.z.flat() : trace.orientation === "h" ? trace.x : trace.y).filter((v) => v !== null);
      const least = values.reduce((a, b) => Math.min(a, b), Infinity), most = values.reduce((a, b) => Math.max(a, b), -Infinity);
      rows.push([trace.name ? plain(trace.name) : "", values[values.length - 1], least, most].map((v) => typeof v === "number" && Number.isFinite(v) ? formatNumber(v) : typeof v === "string" ? v : ""));
    }
    details.querySelector("div").replaceChildren(makeTable(rows));
  };
  details.ontoggle = fill;
  fill();
}

function makeTable(rows, style = "") {
  const [head, ...body] = rows;
  return make("table", { class: style || null },
    make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
    make("tbody", {}, ...body.map(([first, ...cells]) => make("tr", {}, make("th", { scope: "row" }, first), ...cells.map((cell, index) => make("td", { "data-head": head[index + 1] }, cell))))));
}

function makeCard(figure) {
  const id = figure.id, isWide = /-(timeline|loads|time|expert_load|plan)$/.test(id);
  const [variants, shown] = listVariants(figure);
  let select = null;
  if (variants.length > 1) {
    select = make("select", { "aria-label": figure.title + ": what to show", onchange: (event) => { state.shown[id] = variants[event.target.selectedIndex]; drawFigure(figure); } },
      ...variants.map((variant) => make("option", {}, variant.label)));
    select.selectedIndex = shown;
  }
  return make("section", { class: isWide ? "card wide" : "card", "aria-label": figure.title },
    make("header", {}, make("h3", {}, figure.title), select),
    make("p", { class: "about" }, figure.about),
    make("div", { class: "legend", id: "legend-" + id, role: "group", "aria-label": figure.title + ": what to draw", hidden: true }),
    make("div", { class: "plot", id: "plot-" + id, role: "img", "aria-label": "Plot: " + figure.title }),
    make("details", { id: "numbers-" + id }, make("summary", {}, "Numbers"), make("div", { class: "scroll" })));
}

// Runs and settings

function makeRuns(runs) { // what is the same in all, then a table
  const names = [...new Set(runs.flatMap((run) => Object.keys(run)))].filter((name) => runs.length < 2 || name !== "run");
  const rows = names.map((name) => [name, ...runs.map((run) => run[name] ?? "")]);
  const isSame = ([, first, ...others]) => others.every((value) => value === first);
  const same = rows.filter(isSame).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  const different = rows.filter((row) => !isSame(row));
  return [make("dl", {}, ...same), different.length ? makeComparison(different, runs) : ""];
}

function makeComparison(rows, runs) { // rows: name and the value of each run; of few names and many runs, a row is a run
  const names = runs.map((run) => run.run);
  const turned = [["run", ...rows.map(([name]) => name)], ...names.map((name, index) => [name, ...rows.map((row) => row[index + 1])])];
  return make("div", { class: "scroll" }, makeTable(names.length > rows.length ? turned : [["", ...names], ...rows], "stack"));
}

function makeSettings(data) {
  return data.settings.length ? makeComparison(data.settings, data.runs) : make("p", {}, "All settings are the same.");
}

// Samples

function listSamples() {
  const { run, source, sort } = state.sample;
  const entry = state.data.samples[run];
  if (!entry) return [];
  const samples = entry.samples.filter((sample) => !source || sample.source === source);
  const keys = { "highest reward": (s) => -(s.reward ?? -Infinity), "lowest reward": (s) => s.reward ?? Infinity, "longest": (s) => -s.tokens, "largest gap": (s) => -(s.gap ?? -1) };
  if (keys[sort]) samples.sort((a, b) => keys[sort](a) - keys[sort](b));
  return samples;
}


function makeChoice(label, options, index, choose) {
  const select = make("select", { onchange: (event) => choose(event.target.selectedIndex) }, ...options.map((option) => make("option", {}, option)));
  select.selectedIndex = index;
  return make("label", {}, label, select);
}

function drawSamples() {
  const box = document.getElementById("browser"), choice = state.sample;
  if (!state.data.samples.some((entry) => entry.samples.length)) { const texts = state.data.samples.flatMap((entry) => entry.notes); box.replaceChildren(...(texts.length ? [...new Set(texts)] : ["There are none: the run has written no table of samples yet."]).map((text) => make("p", {}, text))); return; }
  choice.run = Math.min(choice.run, state.data.samples.length - 1);
  const sources = ["", ...new Set(state.data.samples[choice.run].samples.map((sample) => sample.source))];
  if (!sources.includes(choice.source)) choice.source = "";
  const sorts = ["order", "highest reward", "lowest reward", "longest", "largest gap"];
  const change = (values) => { Object.assign(choice, { at: 0, label: "" }, values); drawSamples(); };
  const controls = make("div", { class: "controls" },
    state.data.samples.length > 1 ? makeChoice("Run", state.data.samples.map((entry) => entry.run), choice.run, (index) => change({ run: index, source: "" })) : null,
    makeChoice("From", sources.map((source) => source || "all"), sources.indexOf(choice.source), (index) => change({ source: sources[index] })),
    makeChoice("Sort by", sorts, sorts.indexOf(choice.sort), (index) => change({ sort: sorts[index] })));
  const samples = listSamples();
  const same = samples.findIndex((sample) => sample.label === choice.label); // newer ones may come before it
  choice.at = same >= 0 ? same : Math.min(choice.at, Math.max(samples.length - 1, 0));
  const list = make("ol", { class: "list", "aria-label": "Samples" }, ...samples.map((sample, index) =>
    make("li", {}, make("button", { type: "button", "aria-current": String(index === choice.at), onclick: () => showSample(index), onkeydown: (event) => moveSample(event, index) },
      make("span", {}, sample.label), make("b", {}, formatNumber(sample.reward)), make("small", {}, sample.tokens === null ? "" : `${sample.tokens} tokens`), make("small", {}, sample.gap === null ? "" : `gap ${formatNumber(sample.gap)}`)))));
  const notes = state.data.samples[choice.run].notes.map((note) => make("p", { class: "note" }, note));
  box.replaceChildren(...notes, controls, make("div", { class: "browser" }, list, make("article", { class: "sample", id: "sample", "aria-live": "polite" })));
  if (samples.length) showSample(choice.at);
}

function moveSample(event, index) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], buttons = document.querySelectorAll(".list button");
  if (!step || !buttons[index + step]) return;
  event.preventDefault();
  buttons[index + step].focus();
  showSample(index + step);
}

function showSample(index) {
  const sample = listSamples()[index];
  Object.assign(state.sample, { at: index, label: sample.label });
  document.querySelectorAll(".list button").forEach((button, at) => button.setAttribute("aria-current", String(at === index)));
  const parts = [make("h3", {}, sample.label), make("dl", {}, ...sample.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))];
  sample.segments.forEach((messages, number) => {
    if (sample.segments.length > 1) parts.push(make("h3", {}, `segment ${number}`));
    parts.push(...messages.map(makeMessage));
  });
  document.getElementById("sample").replaceChildren(...parts);
}

function makeMessage(message) {
  const about = message.about ? make("span", {}, " " + message.about) : null;
  const text = make("pre", { class: "text" }, ...message.spans.map((span) => {
    const classes = [...(span.kind || []), ...("gap" in span ? ["gap"] : [])];
    return classes.length ? make("span", { class: classes.join(" "), title: describeTokens(span) || null }, span.text) : document.createTextNode(span.text);
  }));
  const roles = ["system", "user", "assistant", "tool"];
  return make("section", { class: "message " + (roles.includes(message.role) ? message.role : "") }, make("h4", {}, message.role, about), text, makeTokens(message));
}

function describeTokens(span) {
  return (span.tokens || []).map(([servers, trainer, advantage]) => `servers ${formatNumber(servers)}, trainer ${formatNumber(trainer)}, advantage ${formatNumber(advantage)}`).join("\n");
}

function makeTokens(message) {
  const spans = message.spans.filter((span) => span.tokens);
  if (!spans.length) return null;
  const box = make("div", { class: "scroll tokens", tabindex: "0", role: "region", "aria-label": "Log-probs of tokens" });
  const details = make("details", {}, make("summary", {}, "Log-probs of each token"), box);
  details.addEventListener("toggle", () => {
    if (!details.open || box.firstChild) return;
    const rows = spans.flatMap((span) => span.tokens.map(([servers, trainer, advantage], index) =>
      [index ? "″" : JSON.stringify(span.text).slice(1, -1), formatNumber(servers), formatNumber(trainer), servers === null || trainer === null ? "–" : formatNumber(Math.abs(trainer - servers)), formatNumber(advantage)]));
    box.append(makeTable([["token", "servers", "trainer", "gap", "advantage"], ...rows]));
  });
  return details;
}

// The page

async function draw() {
  const { data } = state, main = document.getElementById("main");
  document.getElementById("title").textContent = data.title;
  document.title = `${data.title} · mcore-rl report`;
  const sections = [...new Set(data.figures.map((figure) => figure.section))];
  const ids = data.figures.map((figure) => figure.id).join("\n");
  fillRunsLegend();
  document.getElementById("runs-table").replaceChildren(...makeRuns(data.runs));
  document.getElementById("settings-box").replaceChildren(makeSettings(data));
  if (ids !== state.ids) { // the same plots keep their zoom
    state.ids = ids;
    const nav = [["runs", "Runs"], ...sections.map((name) => ["section-" + name, name.replaceAll("_", " ")]), ["samples", "Samples"], ...(data.runs.length > 1 ? [["settings", "Settings"]] : [])];
    document.getElementById("nav").replaceChildren(...nav.map(([id, text]) => make("a", { href: "#" + id }, text[0].toUpperCase() + text.slice(1))));
    document.getElementById("plots").replaceChildren(...sections.flatMap((name) => [
      make("h2", { id: "section-" + name }, name[0].toUpperCase() + name.slice(1).replaceAll("_", " ")),
      make("div", { class: "plots" }, ...data.figures.filter((figure) => figure.section === name).map(makeCard))]));
  } else {
    for (const figure of data.figures) { // more steps to choose from
      const header = document.getElementById("plot-" + figure.id).parentElement.querySelector("header");
      const newer = makeCard(figure).querySelector("header"), hasFocus = header.contains(document.activeElement);
      header.replaceWith(newer);
      if (hasFocus) newer.querySelector("select")?.focus();
    }
  }
  const samples = JSON.stringify(data.samples);
  if (samples !== state.samplesText) { state.samplesText = samples; drawSamples(); }
  const header = document.querySelector("body > header"); // sections stop beneath it
  document.documentElement.style.scrollPaddingTop = `${header.offsetHeight + 12}px`;
  await Promise.all(data.figures.map(drawFigure));
  main.dataset.drawn = String(data.figures.length);
}

function prepare(data) {
  document.getElementById("main").append(
    make("section", {}, make("h2", { id: "runs" }, "Runs"), make("div", { id: "runs-table" })),
    make("section", { id: "plots" }),
    make("section", {}, make("h2", { id: "samples" }, "Samples"),
      make("p", { class: "about" }, "Green: chosen by the policy. Underlined: log-probs of trainer and servers differ by 0.1 nats or more. Arrow keys move through the list."),
      make("div", { id: "browser" })),
    make("section", { hidden: data.runs.length < 2 }, make("h2", { id: "settings" }, "Settings that differ"), make("div", { id: "settings-box" })));
}

function takeToken() { // from the address; a section that it names instead has a shorter name
  const given = location.hash.slice(1);
  const token = /^[\w-]{43}$/.test(given) ? given : sessionStorage.getItem("token") || "";
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
  return token;
}

async function poll() {
  try {
    const headers = { Authorization: `Bearer ${state.token}`, ...(state.version ? { "If-None-Match": state.version } : {}) };
    const response = await fetch("data", { headers, cache: "no-store" });
    if (response.status === 200) {
      state.version = response.headers.get("ETag");
      const isFirst = state.data === null;
      state.data = await response.json();
      if (isFirst) prepare(state.data);
      await draw();
    } else if (response.status !== 304) throw new Error((await response.text()) || String(response.status));
    setStatus(`Live. Last look: ${new Date().toLocaleTimeString()}.`);
  } catch (error) {
    setStatus(`No new data: ${error.message}. The plots are those of the last answer.`);
  }
  setTimeout(poll, 2000);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (state.data && window.Plotly) state.data.figures.forEach(drawFigure);
}

async function start() {
  if (isLive) state.token = takeToken();
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const script = document.createElement("script");
  script.textContent = await unpack(document.getElementById("plotly").textContent);
  document.head.append(script);
  if (isLive) { await poll(); return; }
  state.data = JSON.parse(await unpack(document.getElementById("data").textContent));
  prepare(state.data);
  await draw();
  setStatus("");
}

start().catch((error) => { setStatus(`The page cannot be drawn: ${error.message}`); throw error; });
