/* What the page shows, in the address; and the stream of pictures from the lab. */
const LAB = /*LAB*/null;
const byId = (name) => document.getElementById(name);
const DEFAULTS = {
  task: "regression", points: [], view: [-4, 4, -2.5, 2.5], use: null, width: 20, depth: 1, activation: "tanh", prior: 1, by_width: false,
  noise: 0.1, beta: 1, rate: 0.1, seed: 0, methods: ["laplace"], judge: null, panel: "function", layer: "epistemic", tool: "add",
  epsilon: 0.3, risk: 0.1, preset: null };
const state = structuredClone(DEFAULTS);
const history_ = [];

const presetOf = (name) => LAB.presets.find((each) => each.name === name);
function setState(values) { Object.assign(state, structuredClone(DEFAULTS), structuredClone(values)); }
function choosePreset(name) { const found = presetOf(name); if (found) setState({ ...found.state, preset: name }); return Boolean(found); }
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function encoded() {
  const base = { ...DEFAULTS, ...(presetOf(state.preset) || { state: {} }).state, preset: state.preset };
  const changes = Object.fromEntries(Object.entries(state).filter(([name, value]) => name !== "preset" && !same(value, base[name])));
  const preset = state.preset ? `preset=${state.preset}` : "";
  const rest = Object.keys(changes).length ? `state=${btoa(JSON.stringify(changes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}` : "";
  return "#" + [preset, rest].filter(Boolean).join("&");
}
/* Take up the state of an address; returns a sentence where it cannot be read. */
function decode(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const preset = parts.get("preset");
  if (preset && !presetOf(preset)) return `The link names an example that is not here: ${preset.slice(0, 40)}.`;
  if (preset) choosePreset(preset); else setState({});
  if (!parts.get("state")) return preset ? "" : null;
  try {
    const changes = JSON.parse(atob(parts.get("state").replaceAll("-", "+").replaceAll("_", "/")));
    const wrong = Object.entries(changes).find(([name, value]) => !fits(name, value));
    if (wrong) return `The link cannot be read: ${wrong[0]} is not what it should be.`;
    Object.assign(state, changes);
    return "";
  } catch { return "The link cannot be read: it is damaged or cut short."; }
}
const CHOICES = { task: ["regression", "classes"], panel: ["function", "weights", "terms", "chains"], tool: ["add", "erase", "attack"], layer: ["probability", "aleatoric", "epistemic"] };
function fits(name, value) {
  if (!(name in DEFAULTS)) return false;
  if (name === "points") return Array.isArray(value) && value.length <= LAB.most.points && value.every((each) => Array.isArray(each) && each.every(Number.isFinite));
  if (name === "view") return Array.isArray(value) && value.length === 4 && value.every(Number.isFinite) && value[0] < value[1] && value[2] < value[3];
  if (name === "methods") return Array.isArray(value) && value.length >= 1 && value.length <= LAB.most.methods && value.every((each) => each in LAB.offers);
  if (name === "judge") return value === null || value in LAB.judges;
  if (name === "activation") return LAB.activations.includes(value);
  if (name in CHOICES) return CHOICES[name].includes(value);
  if (name === "by_width") return typeof value === "boolean";
  if (name === "use" || name === "noise") return value === null || Number.isFinite(value);
  return Number.isFinite(value);
}
function writeHash() { const hash = encoded(); if (hash !== location.hash) history.replaceState(null, "", hash || "#"); }

const used = () => state.use === null ? state.points : state.points.slice(0, Math.max(1, state.use));
function problem() {
  const { task, view, width, depth, activation, prior, by_width, noise, beta, rate, seed } = state;
  return { task, points: used(), view, width, depth, activation, prior, by_width, noise, beta, rate, seed };
}
/* All that a method's picture depends on, as text. */
function keyOf(method, judge) {
  const whole = problem();
  for (const name of ["beta", "rate"]) if (judge || !LAB.offers[method].uses.includes(name)) delete whole[name];
  if (state.task === "classes") delete whole.noise;
  return JSON.stringify([method, judge, whole]);
}

/* One stream at a time: a new one begins before the old one ends, so that what both want goes on. */
const stream = { number: 0, abort: null, boot: null, timer: 0, tries: 0, pictures: [], asked: 0 };
function refit(delay = 40) {
  writeHash();
  prepareSlots();
  clearTimeout(stream.timer);
  stream.timer = setTimeout(follow, delay);
  stream.asked = performance.now();
}
async function follow() {
  const number = ++stream.number, before = stream.abort, mine = new AbortController();
  stream.abort = mine;
  if (!slots.some((slot) => !slot.ended)) { before?.abort(); said(""); return; }
  const body = JSON.stringify({ problem: problem(), methods: state.methods, judge: state.judge });
  let ended = false, wrong = "";
  try {
    const answer = await fetch("fit", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: mine.signal });
    before?.abort();
    if (!answer.ok) { wrong = (await answer.json().catch(() => ({}))).error || `The lab answered ${answer.status}.`; ended = true; }
    else {
      stream.tries = 0; said("");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await withPatience(reader.read(), mine);
        if (done) break;
        if (number !== stream.number) return;
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines) if (line) { const found = JSON.parse(line); ended ||= Boolean(found.end); take(found); }
      }
    }
  } catch { before?.abort(); }
  if (number !== stream.number) return;
  if (wrong) return complain(wrong);
  if (!ended) {
    said("No answer. Trying again …", true);
    for (const slot of slots) if (!slot.ended) slot.state = "waiting";
    renderAll();
    stream.timer = setTimeout(follow, Math.min(2000, 300 * ++stream.tries));
  } else said("");
}
function withPatience(promise, abort) {
  let timer;
  const late = new Promise((_, reject) => { timer = setTimeout(() => { abort.abort(); reject(new Error("silence")); }, 8000); });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
function said(text, bad = false) { byId("status").textContent = text; byId("status").classList.toggle("bad", bad); }
function complain(text) { const box = byId("error"); box.textContent = text || ""; box.hidden = !text; }
async function post(path, body) {
  let answer;
  try { answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }); }
  catch { throw new Error("The lab cannot be reached."); }
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `The lab answered ${answer.status}.`);
  return answer;
}
