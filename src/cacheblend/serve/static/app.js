// The page's only state is the list of chosen passages; everything else is read from the controls when needed.
const byId = (id) => document.getElementById(id);
const library = { passages: [], questions: [], settings: {} };
let chosen = [];
let dragged = null;

const element = (name, text, attributes = {}) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function showError(message) {
  const box = byId("error");
  box.textContent = message;
  box.hidden = !message;
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  return new Error(body.error?.message ?? `the server answered with status ${response.status}`);
}

// ---- choosing ---------------------------------------------------------------------------------------------

function small(label, text, act, disabled = false) {
  const button = element("button", text, { type: "button", class: "small", "aria-label": label, title: label });
  button.disabled = disabled;
  button.addEventListener("click", act);
  return button;
}

function drawLibrary() {
  byId("library").replaceChildren(...library.passages.map((passage) => {
    const item = element("li");
    const taken = chosen.includes(passage);
    item.append(element("b", passage.title), element("p", passage.text));
    item.append(small(`Add ${passage.title}`, "+", () => choose([...chosen, passage]), taken));
    return item;
  }));
}

function drawPrompt() {
  byId("prompt").replaceChildren(...chosen.map((passage, at) => {
    const item = element("li", undefined, { draggable: "true", "data-title": passage.title });
    item.append(element("b", passage.title), element("p", passage.text));
    item.append(small(`Move ${passage.title} up`, "↑", () => move(at, at - 1), at === 0));
    item.append(small(`Move ${passage.title} down`, "↓", () => move(at, at + 1), at === chosen.length - 1));
    item.append(small(`Remove ${passage.title}`, "×", () => choose(chosen.filter((one) => one !== passage))));
    item.addEventListener("dragstart", () => { dragged = at; });
    item.addEventListener("dragover", (event) => { event.preventDefault(); item.classList.add("over"); });
    item.addEventListener("dragleave", () => item.classList.remove("over"));
    item.addEventListener("drop", (event) => { event.preventDefault(); if (dragged !== null) move(dragged, at); dragged = null; });
    return item;
  }));
}

function choose(passages) {
  chosen = passages;
  drawLibrary();
  drawPrompt();
}

function move(from, to) {
  const moved = [...chosen];
  moved.splice(to, 0, ...moved.splice(from, 1));
  choose(moved);
}

function shuffle() {
  const mixed = [...chosen];
  for (let at = mixed.length - 1; at > 0; at--) {
    const other = Math.floor(Math.random() * (at + 1));
    [mixed[at], mixed[other]] = [mixed[other], mixed[at]];
  }
  choose(mixed);
}

// ---- asking -----------------------------------------------------------------------------------------------

// What to send about blending: nothing if the model's settings are chosen, so that the engine uses its own.
function blending() {
  const selector = byId("selector").value;
  return selector ? { selector, recompute_ratio: Number(byId("ratio").value) } : {};
}

function drawRatio() {
  const own = !byId("selector").value;
  const ratio = own ? library.settings.recompute_ratio : Number(byId("ratio").value);
  byId("ratio").disabled = own;
  if (own && ratio != null) byId("ratio").value = ratio;
  byId("ratio-shown").textContent = ratio?.toFixed(2) ?? "";
}

function request(mode) {
  const extras = mode === "blend" ? { mode, ...blending() } : { mode };
  return {
    messages: [{ role: "user", content: byId("question").value }],
    documents: chosen.map(({ title, text }) => ({ title, text })),
    max_tokens: 48,
    temperature: 0,
    stream: true,
    cacheblend: extras,
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(mode) {
  const pane = byId(`pane-${mode}`);
  const [text, facts] = [pane.querySelector(".answer"), pane.querySelector(".facts")];
  text.textContent = "";
  facts.textContent = "...";
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(request(mode)) });
  if (!response.ok) throw await failure(response);
  let report = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    text.textContent += event.choices[0]?.delta?.content ?? "";
    report = event.cacheblend ?? report;
  }
  const loaded = Object.values(report.hit_tokens).reduce((sum, count) => sum + count, 0);
  const sources = loaded ? `${loaded} loaded from the store, ${report.recomputed_tokens} of these recomputed` : "all computed";
  facts.textContent = `${report.prompt_tokens} prompt tokens: ${sources}`;
  return { text: text.textContent, ttft: report.ttft_s };
}

function drawTimes(blend, full) {
  const longest = Math.max(blend.ttft, full.ttft);
  for (const [mode, one] of [["blend", blend], ["full", full]]) {
    byId(`bar-${mode}`).style.width = `${(100 * one.ttft) / longest}%`;
    byId(`time-${mode}`).textContent = `${(1000 * one.ttft).toFixed(0)} ms`;
  }
  byId("speedup").textContent = full.ttft > blend.ttft
    ? `With blending the first token came ${(full.ttft / blend.ttft).toFixed(1)} times as fast.`
    : "Blending was not faster for this prompt; short prompts gain little.";
}

function drawWhy(found, blend, full) {
  const same = blend.text === full.text ? "Both answers are the same." : "The answers differ.";
  const first = found.top_1
    ? "Both give the same most likely first token"
    : `The most likely first token is "${found.first_token}" with blending and "${found.full_first_token}" with full recompute`;
  byId("quality").textContent = `${same} ${first}; KL divergence between the first token's distributions: ${found.kl.toPrecision(2)} nats.`;
  byId("heat").hidden = !found.strength;
  byId("heat").textContent = found.strength === "attention" ? "darker: more attention by the question" : "darker: larger KV deviation";
  byId("why").replaceChildren(...found.segments.map((segment) => {
    const title = segment.is_chunk ? segment.title || "passage" : "text";
    const part = element("div", undefined, { class: "part", "data-title": title });
    for (const token of segment.tokens) {
      const shown = element("span", token.text, { class: token.source, title: found.strength ? `${token.source}, ${found.strength} ${token.strength}` : token.source });
      const heated = token.source === "loaded" || token.source === "recomputed";
      if (heated && token.strength > 0) {
        shown.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.round(70 * Math.sqrt(token.strength))}%, var(--loaded))`;
      }
      part.append(shown);
    }
    return part;
  }));
}

async function ask() {
  if (!chosen.length) return showError("Add a passage to the prompt first.");
  if (!byId("question").value.trim()) return showError("Enter a question.");
  showError("");
  byId("ask").disabled = true;
  byId("ask").textContent = "Asking ...";
  byId("speedup").textContent = byId("quality").textContent = "";
  document.body.dataset.state = "asking";
  try {
    const texts = chosen.map(({ title, text }) => ({ title, text }));
    const body = { documents: texts, question: byId("question").value, ...blending() };
    // This stores missing passages, so that both answers find them stored, as on a server that has run for a while.
    const why = await fetch("/playground/explain", { method: "POST", headers: headers(), body: JSON.stringify(body) });
    if (!why.ok) throw await failure(why);
    const found = await why.json();
    const blend = await answer("blend"); // one after the other: at the same time they would share the processors
    const full = await answer("full");
    drawTimes(blend, full);
    drawWhy(found, blend, full);
    document.body.dataset.state = "done";
  } catch (error) {
    showError(error.message);
    document.body.dataset.state = "failed";
  } finally {
    byId("ask").disabled = false;
    byId("ask").textContent = "Ask";
  }
}

// ---- checked answers --------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const [PLOT_WIDTH, PLOT_HEIGHT, PLOT_EDGE] = [600, 160, 30];

// By comparison, not by the clock: a server may have none for hours.
function curve(values, kind) {
  const step = (PLOT_WIDTH - PLOT_EDGE) / Math.max(1, values.length - 1);
  const at = (value, number) => `${(PLOT_EDGE + number * step).toFixed(1)},${(5 + (PLOT_HEIGHT - 10) * (1 - value)).toFixed(1)}`;
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("class", kind);
  line.setAttribute("points", values.map((value, number) => (value === null ? "" : at(value, number))).join(" ").trim());
  return line;
}

function scale(value) {
  const text = document.createElementNS(SVG, "text");
  text.setAttribute("x", "0");
  text.setAttribute("y", String(9 + (PLOT_HEIGHT - 10) * (1 - value)));
  text.textContent = `${100 * value} %`;
  return text;
}

function drawShadow(found) {
  byId("shadow").hidden = !found.on;
  if (!found.on) return;
  const moments = found.moments.length > 1 ? found.moments : [...found.moments, ...found.moments];
  const curves = [curve(moments.map((one) => one.ratio), "ratio"), curve(moments.map((one) => one.bound), "bound")];
  curves.push(curve(moments.map((one) => one.agreement), "agreement"));
  if (found.floor !== null) curves.push(curve(moments.map(() => found.floor), "floor"));
  byId("shadow-plot").replaceChildren(scale(1), scale(0.5), scale(0), ...curves);
  const last = found.moments.at(-1);
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const ratio = found.ratio === null ? "" : ` Recompute ratio in force: ${found.ratio.toFixed(2)}.`;
  byId("shadow-facts").textContent = (last
    ? `${percent(last.agreement)} of the last ${last.rows} agree with full prefill (lower bound ${percent(last.bound)}).`
    : "No answer has been compared yet.") + ` ${found.compared} compared, ${found.waiting} waiting, ${found.dropped} dropped.${ratio}`;
}

async function watchShadow() {
  const response = await fetch("/playground/shadow", { headers: headers() }).catch(() => null);
  if (response?.ok) drawShadow(await response.json());
  else byId("shadow").hidden = true; // without a key nothing is shown
}

// ---- the start --------------------------------------------------------------------------------------------

byId("ask").addEventListener("click", ask);
byId("question").addEventListener("keydown", (event) => { if (event.key === "Enter") ask(); });
byId("shuffle").addEventListener("click", shuffle);
byId("clear").addEventListener("click", () => choose([]));
byId("ratio").addEventListener("input", drawRatio);
byId("selector").addEventListener("change", drawRatio);
byId("add-own").addEventListener("click", () => {
  const text = byId("own").value.trim();
  if (!text) return;
  const passage = { title: `your passage ${library.passages.filter((one) => one.own).length + 1}`, own: true, text };
  library.passages.push(passage);
  byId("own").value = "";
  choose([...chosen, passage]);
});

const found = await (await fetch("/playground/passages")).json();
library.passages = found.passages;
library.questions = found.questions;
library.settings = found.settings;
byId("selector").options[0].textContent = `the model's settings: ${found.settings.selector}`;
drawRatio();
byId("questions").replaceChildren(...library.questions.map((one) => element("option", one.category, { value: one.text })));
choose([]);
if (found.settings.shadow) {
  watchShadow();
  setInterval(() => { if (!document.hidden) watchShadow(); }, 5000);
}
