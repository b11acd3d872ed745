/* Controls, pointer and keys, buttons, files. */
const SLIDERS = {
  use: { label: "Points used", low: 2, high: () => Math.max(2, state.points.length), step: 1, value: () => used().length, set: (value) => value >= state.points.length ? null : value, show: (value) => `${Math.min(value, state.points.length)} of ${state.points.length}` },
  width: { label: "Width", scale: [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 65, 80, 100] },
  depth: { label: "Hidden layers", scale: [1, 2, 3] },
  prior: { label: "Prior: sd of a weight", scale: [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8] },
  noise: { label: "Noise: sd of an outcome", scale: [0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.2], off: () => state.task === "classes" || state.noise === null, value: () => state.noise ?? 0.1, show: (value) => state.task === "classes" ? "—" : state.noise === null ? "learned" : short(value) },
  beta: { label: "β: weight of the KL", scale: [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], off: () => !usedBy("beta") },
  rate: { label: "Dropout rate", scale: [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6], off: () => !usedBy("rate") },
  seed: { label: "Seed", low: 0, high: () => 20, step: 1 } };
const usedBy = (name) => state.methods.some((method) => LAB.offers[method].uses.includes(name));
const cursor = { shown: false, place: 0, x: 0, y: 0 };
let newClass = 0;

function change(values, { remember = false, delay } = {}) {
  if (remember) { history_.push(structuredClone(state.points)); if (history_.length > 100) history_.shift(); }
  Object.assign(state, values);
  if (state.use !== null && state.use >= state.points.length) state.use = null;
  complain("");
  byId("told").textContent = "";
  showControls();
  refit(delay);
}
function buildControls() {
  for (const box of document.querySelectorAll(".slider")) {
    const name = box.dataset.name, slider = SLIDERS[name], output = make("output"), input = make("input", { type: "range", id: `slider-${name}` });
    input.addEventListener("input", () => {
      const raw = Number(input.value), value = slider.scale ? slider.scale[raw] : raw;
      change({ [name]: slider.set ? slider.set(value) : value }, { delay: 90 });
    });
    box.append(make("label", { for: input.id }, slider.label, output), input);
  }
  for (const [name, act] of [["task", chooseTask], ["tool", (value) => quietly({ tool: value })], ["layer", (value) => quietly({ layer: value })], ["panel", (value) => quietly({ panel: value })], ["class", (value) => { newClass = Number(value); showControls(); }]]) {
    const buttons = [...byId(name).children];
    buttons.forEach((button, n) => {
      button.addEventListener("click", () => act(button.dataset.value));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = buttons[(n + step + buttons.length) % buttons.length];
        next.focus(); act(next.dataset.value);
      });
    });
  }
  for (const name of LAB.activations) byId("activation").append(make("option", { value: name }, name));
  byId("judge").append(make("option", { value: "" }, "none"), ...Object.entries(LAB.judges).map(([name, label]) => make("option", { value: name }, label)));
  byId("preset").append(make("option", { value: "" }, "Your own"), ...LAB.presets.map((each) => make("option", { value: each.name }, each.title)));
  byId("activation").addEventListener("change", (event) => change({ activation: event.target.value }));
  byId("judge").addEventListener("change", (event) => change({ judge: event.target.value || null }));
  byId("by_width").addEventListener("change", (event) => change({ by_width: event.target.checked }));
  byId("learn").addEventListener("change", (event) => change({ noise: event.target.checked ? null : 0.1 }));
  byId("preset").addEventListener("change", (event) => {
    history_.length = 0;
    if (!choosePreset(event.target.value)) state.preset = null;
    cursor.shown = false; newClass = 0;
    change({});
  });
  for (const name of ["epsilon", "risk"]) byId(name).addEventListener("change", (event) => {
    const value = Number(event.target.value), { min, max } = event.target;
    if (!(value >= Number(min) && value <= Number(max))) { complain(`${name === "risk" ? "The risk" : "The size of the attack"} must be from ${min} to ${max}.`); event.target.value = state[name]; return; }
    quietly({ [name]: value });
  });
}
/* A change that needs no new fit. */
function quietly(values) { Object.assign(state, values); complain(""); showControls(); writeHash(); renderAll(); }

function showControls() {
  for (const box of document.querySelectorAll(".slider")) {
    const name = box.dataset.name, slider = SLIDERS[name], input = box.querySelector("input"), value = slider.value ? slider.value() : state[name];
    if (slider.scale) { input.min = 0; input.max = slider.scale.length - 1; input.step = 1; input.value = slider.scale.reduce((best, each, n) => Math.abs(Math.log(each / value)) < Math.abs(Math.log(slider.scale[best] / value)) ? n : best, 0); }
    else { input.min = slider.low; input.max = slider.high(); input.step = slider.step; input.value = value; }
    const off = Boolean(slider.off?.());
    input.disabled = off; box.classList.toggle("off", off);
    const words = slider.show ? slider.show(value) : short(value);
    box.querySelector("output").textContent = words;
    input.setAttribute("aria-valuetext", words);
  }
  for (const [name, value] of [["task", state.task], ["tool", state.tool], ["layer", state.layer], ["panel", state.panel], ["class", String(newClass)]])
    for (const button of byId(name).children) { const on = button.dataset.value === value; button.setAttribute("aria-checked", on); button.tabIndex = on ? 0 : -1; }
  const classes = state.task === "classes";
  byId("class").hidden = !classes || state.tool !== "add";
  byId("layer").hidden = !classes || state.panel !== "function";
  byId("epsilon-row").hidden = state.tool !== "attack";
  byId("learn-row").hidden = classes;
  byId("ask-evaluate").hidden = classes;
  byId("add-method").hidden = state.methods.length >= LAB.most.methods;
  byId("activation").value = state.activation; byId("judge").value = state.judge || ""; byId("by_width").checked = state.by_width;
  byId("learn").checked = state.noise === null; byId("epsilon").value = state.epsilon; byId("risk").value = state.risk;
  byId("undo").disabled = !history_.length; byId("clear").disabled = !state.points.length;
  const preset = presetOf(state.preset);
  byId("preset").value = state.preset || "";
  byId("title").textContent = preset ? preset.title : "Your own data";
  byId("text").textContent = preset ? preset.text : "Click on a picture, or draw, to add points. Every method is fitted again at once, and shows what it knows and what it does not.";
  document.title = `${byId("title").textContent} · knowable lab`;
  legend(classes);
}
function legend(classes) {
  const box = byId("legend"), entry = (look, text) => { const key = make("i"); Object.assign(key.style, look.style || {}); key.className = look.kind || ""; return make("span", {}, key, text); };
  const judged = judge || state.judge ? [entry({ kind: "line dashed", style: { borderColor: "var(--judge)" } }, classes ? "border of the judge" : "±2 epistemic sd of the judge")] : [];
  const found = state.panel === "weights" ? [entry({ style: { background: "var(--epistemic)" } }, "a weight: 50% and 90% of its distribution"), entry({ style: { background: "var(--aleatoric)" } }, "a bias"), entry({ style: { background: "var(--wash)" } }, "±2 sd of the prior")]
    : state.panel === "terms" ? !state.methods.some((each) => LAB.offers[each].kind === "chains") ? [] : [entry({ kind: "line dashed", style: { borderColor: "var(--judge)" } }, "chains: R-hat 1.01 and 400 effective draws")]
    : state.panel === "chains" ? [entry({ style: { background: "var(--epistemic)" } }, "draws of two weights; a colour for each chain")]
    : classes ? [...(state.layer === "probability" ? [] : [entry({ style: { background: `linear-gradient(90deg, var(--card), var(--${state.layer}))`, border: "1px solid var(--line)" } }, `${state.layer} uncertainty, from none to ln ${Math.max(2, ...state.points.map((each) => each[2] + 1))} nats`)]), entry({ kind: "line", style: { borderColor: "var(--soft)" } }, "borders of single draws"), ...judged]
    : [entry({ style: { background: "color-mix(in srgb, var(--epistemic) 45%, var(--card))" } }, "±2 sd epistemic: what is not known"), entry({ style: { background: "color-mix(in srgb, var(--aleatoric) 45%, var(--card))" } }, "aleatoric on top: the noise"), entry({ kind: "line", style: { borderColor: "var(--epistemic)" } }, "functions drawn from the posterior"), entry({ kind: "line", style: { borderColor: "var(--mean)" } }, "mean"), ...judged];
  box.replaceChildren(...found);
}
function chooseTask(task) {
  if (task === state.task) return;
  const example = LAB.presets.find((each) => (each.state.task || "regression") === task);
  history_.length = 0;
  choosePreset(example.name);
  change({});
}

/* --- pointer and keys --- */
function listenTo(canvas, place) {
  let last = null, drawing = false, before = 0;
  const where = (event) => {
    const box = canvas.getBoundingClientRect(), frame = new Frame({ width: box.width, height: box.height }, state.view);
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const inside = x >= frame.x0 && x <= frame.x0 + frame.width && y >= frame.y0 && y <= frame.y0 + frame.height;
    return inside ? frame.back(x, y) : null;
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (state.panel !== "function" || event.button) return;
    const at = where(event);
    if (!at) return;
    cursor.shown = false;
    if (event.pointerType === "touch") { last = at; return; }
    canvas.setPointerCapture(event.pointerId);
    drawing = state.tool === "add"; last = at; before = history_.length;
    act(at, place);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    const at = where(event), v = state.view;
    if (at && Math.hypot((at[0] - last[0]) / (v[1] - v[0]), (at[1] - last[1]) / (v[3] - v[2])) > 0.035) { last = at; act(at, place, history_.length > before); }
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => {
    if (end === "pointerup" && event.pointerType === "touch" && last) { const at = where(event); if (at) act(at, place); }
    drawing = false; last = null;
  });
  canvas.addEventListener("keydown", (event) => {
    if (state.panel !== "function" || event.ctrlKey || event.metaKey || event.altKey) return;
    const v = state.view, step = event.shiftKey ? 0.1 : 0.025;
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!cursor.shown) Object.assign(cursor, { shown: true, x: (v[0] + v[1]) / 2, y: (v[2] + v[3]) / 2 });
    cursor.place = place;
    if (move) {
      cursor.x = Math.min(v[1], Math.max(v[0], cursor.x + move[0] * step * (v[1] - v[0])));
      cursor.y = Math.min(v[3], Math.max(v[2], cursor.y + move[1] * step * (v[3] - v[2])));
    } else if (event.key === "Enter" || event.key === " ") act([cursor.x, cursor.y], place);
    else if (event.key === "Backspace" || event.key === "Delete") erase([cursor.x, cursor.y], Infinity);
    else return;
    event.preventDefault();
    renderAll();
  });
  canvas.addEventListener("blur", () => { cursor.shown = false; renderAll(); });
}
function act(at, place, joined = false) {
  if (state.tool === "erase") return erase(at, 0.05);
  if (state.tool === "attack") return attackAt(at);
  if (state.points.length >= LAB.most.points) return complain(`The lab takes ${LAB.most.points} points at most.`);
  const digits = (value, span) => Number(value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(span / 8)))));
  const v = state.view, point = [digits(at[0], v[1] - v[0]), digits(at[1], v[3] - v[2])];
  if (state.task === "classes") point.push(newClass);
  const count = used().length, points = [...state.points.slice(0, count), point, ...state.points.slice(count)];
  change({ points, use: state.use === null ? null : count + 1 }, { remember: !joined, delay: 15 });
}
function nearest(at, furthest) {
  const v = state.view;
  let best = -1, least = furthest;
  used().forEach((point, n) => {
    const distance = Math.hypot((point[0] - at[0]) / (v[1] - v[0]), (point[1] - at[1]) / (v[3] - v[2]));
    if (distance < least) { least = distance; best = n; }
  });
  return best;
}
function erase(at, furthest) {
  const found = nearest(at, furthest);
  if (found >= 0) change({ points: state.points.filter((_, n) => n !== found), use: state.use === null ? null : state.use - 1 }, { remember: true, delay: 15 });
}
function undo() { if (history_.length) { const points = history_.pop(); change({ points, use: null }); } }
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea") || byId("program").open) return;
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && key === "z") { event.preventDefault(); return undo(); }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const tool = { a: "add", e: "erase", t: "attack" }[key], panel = { f: "function", w: "weights", m: "terms", c: "chains" }[key];
  if (tool) quietly({ tool });
  else if (panel) quietly({ panel });
  else if (key === "u") undo();
  else if (["1", "2", "3"].includes(key) && state.task === "classes") { newClass = Number(key) - 1; quietly({ tool: "add" }); }
});

/* --- questions --- */
async function askAll(action, more) {
  const waiting = slots.filter((slot) => !slot.isJudge);
  byId("told").textContent = "…";
  let told = 0;
  await Promise.all(waiting.map(async (slot) => {
    const { key } = slot;
    try {
      const found = await (await post("act", { action, problem: problem(), method: slot.method, ...more })).json();
      if (slot.key !== key || !slots.includes(slot)) return;
      slot.extra = { ...found, ...(more.at || {}), key };
      told++;
    } catch (error) { if (slots.includes(slot) && slot.key === key) slot.extra = { text: error.message, key }; }
    scheduleRender(slot);
  }));
  byId("told").textContent = told ? "" : "See below the pictures why.";
}
function attackAt(at) {
  const point = nearest(at, 0.06);
  if (point < 0) return complain("Click on one of the points to attack it.");
  complain("");
  askAll("attack", { point, epsilon: state.epsilon, at: { at: state.points[point][1] } });
}
byId("ask-label").addEventListener("click", () => askAll("label", {}));
byId("ask-evaluate").addEventListener("click", () => askAll("evaluate", { beta: 2 }));
byId("ask-reject").addEventListener("click", () => askAll("reject", { risk: state.risk }));
byId("add-method").addEventListener("click", () => {
  const free = Object.entries(LAB.offers).find(([name, offer]) => !state.methods.includes(name) && !(offer.linear && state.task === "classes"));
  change({ methods: [...state.methods, free[0]] });
});
byId("undo").addEventListener("click", undo);
byId("clear").addEventListener("click", () => change({ points: [], use: null, preset: null }, { remember: true }));

/* --- files, links, figures, Python --- */
function readTable(text) {
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  if (!lines.length) throw new Error("The file is empty.");
  const mark = ["\t", ";", ","].find((each) => lines[0].includes(each)) || ",";
  const cells = lines.map((line) => line.split(mark).map((cell) => cell.trim().replace(/^"(.*)"$/, "$1")));
  const number = (cell) => cell === "" ? NaN : Number(mark === ";" ? cell.replace(",", ".") : cell);
  const head = cells[0].some((cell) => Number.isNaN(number(cell))) ? cells.shift() : cells[0].map((_, n) => `column ${n + 1}`);
  if (cells.length < 2) throw new Error("The file has fewer than two rows of data.");
  const columns = head.map((name, n) => ({ name, cells: cells.map((row) => row[n] ?? ""), values: cells.map((row) => number(row[n] ?? "")) }));
  const numeric = columns.filter((each) => each.values.filter(Number.isFinite).length > 0.5 * cells.length);
  const last = columns.at(-1), labels = [...new Set(last.cells)].sort();
  const classes = numeric.filter((each) => each !== last).length >= 2 && labels.length >= 2 && labels.length <= LAB.most.classes;
  const chosen = classes ? numeric.filter((each) => each !== last).slice(0, 2) : numeric.slice(0, 2);
  if (chosen.length < 2) throw new Error("The file needs two columns of numbers (x and y), or three with a class of up to 3 labels in the last.");
  const rows = cells.map((_, n) => n).filter((n) => chosen.every((each) => Number.isFinite(each.values[n])));
  const scales = chosen.map((each) => {
    const values = rows.map((n) => each.values[n]), mean = values.reduce((a, b) => a + b, 0) / values.length;
    return [mean, Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length) || 1];
  });
  const order = shuffled(rows).slice(0, LAB.most.points);
  const points = order.map((n) => [...chosen.map((each, k) => Number(((each.values[n] - scales[k][0]) / scales[k][1]).toFixed(3))), ...(classes ? [labels.indexOf(last.cells[n])] : [])]);
  if (classes && new Set(points.map((point) => point[2])).size < 2) throw new Error("The rows that can be read are all of one class.");
  const range = (k, more) => { const values = points.map((point) => point[k]), low = Math.min(...values), high = Math.max(...values), margin = more * (high - low || 1); return [Number((low - margin).toFixed(2)), Number((high + margin).toFixed(2))]; };
  const dropped = cells.length - points.length, names = chosen.map((each, k) => `${each.name} (mean ${short(scales[k][0])}, sd ${short(scales[k][1])})`);
  const words = `${classes ? `Inputs: ${names.join(" and ")}; classes of ${last.name}: ${labels.join(", ")}` : `Input: ${names[0]}; outcome: ${names[1]}`}. Both are standardised here.` +
    (dropped ? ` ${dropped} of ${cells.length} rows were left out: the lab takes ${LAB.most.points}, with all values.` : "");
  return { values: { task: classes ? "classes" : "regression", points, view: [...range(0, 0.25), ...range(1, 0.35)], preset: null, use: null, noise: classes ? 0.1 : null }, words };
}
function shuffled(list) { let seed = 1; const found = [...list]; for (let n = found.length - 1; n > 0; n--) { seed = (seed * 48271) % 2147483647; const k = seed % (n + 1); [found[n], found[k]] = [found[k], found[n]]; } return found; }
async function openFile(file) {
  try {
    if (file.size > 5e6) throw new Error("The file is larger than 5 MB. The lab is for small data: use knowable fit.");
    const { values, words } = readTable(await file.text());
    const methods = values.task === "classes" ? state.methods.filter((each) => !LAB.offers[each].linear) : state.methods;
    change({ ...values, methods: methods.length ? methods : ["laplace"] }, { remember: true });
    byId("told").textContent = words;
  } catch (error) { complain(`${file.name}: ${error.message}`); }
}
byId("open").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", (event) => { if (event.target.files[0]) openFile(event.target.files[0]); event.target.value = ""; });
for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
document.addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]); });

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); said(`${what} copied`); } catch { said("The browser does not allow copying. Copy from the address bar.", true); }
  setTimeout(() => said(""), 2500);
}
byId("link").addEventListener("click", () => { writeHash(); copy(location.href, "Link"); });
function download(content, name, kind) {
  const link = make("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
/* All panels in one figure, on a surface that is made for its size. */
function figure(surfaceFor) {
  const wide = 460, high = Math.round(wide * (state.task === "classes" && state.panel === "function" ? 0.72 : 0.6)), shown = slots.filter((slot) => !slot.isJudge);
  const columns = Math.min(2, shown.length), rows = Math.ceil(shown.length / columns);
  return surfaceFor(columns * (wide + 16) + 16, rows * (high + 42) + 46, wide, high, shown.map((slot, n) => [slot, 16 + (n % columns) * (wide + 16), 44 + Math.floor(n / columns) * (high + 42)]));
}
function asSvg() {
  return figure((width, height, wide, high, places) => {
    const whole = new SvgSurface(width, height);
    whole.rect(0, 0, width, height, THEME.card);
    whole.text(byId("title").textContent, 16, 26, { fill: THEME.ink, size: 17, weight: 600 });
    for (const [slot, x, y] of places) {
      whole.text(LAB.offers[slot.method].label, x + 4, y + 16, { fill: THEME.ink, size: 13, weight: 600 });
      const part = new SvgSurface(wide, high);
      drawSlot(part, slot);
      whole.within(x, y + 24, () => whole.parts.push(...part.parts));
    }
    return whole.document();
  });
}
function asPng() {
  return figure((width, height, wide, high, places) => {
    const canvas = document.createElement("canvas"), whole = new CanvasSurface(canvas, width, height, 2);
    whole.rect(0, 0, width, height, THEME.card);
    whole.text(byId("title").textContent, 16, 26, { fill: THEME.ink, size: 17, weight: 600 });
    for (const [slot, x, y] of places) {
      whole.text(LAB.offers[slot.method].label, x + 4, y + 16, { fill: THEME.ink, size: 13, weight: 600 });
      const part = document.createElement("canvas");
      drawSlot(new CanvasSurface(part, wide, high, 2), slot);
      whole.image(part, x, y + 24, wide, high);
    }
    return canvas;
  });
}
byId("svg").addEventListener("click", () => { download(asSvg(), "lab.svg", "image/svg+xml"); byId("save").open = false; });
byId("png").addEventListener("click", () => { asPng().toBlob((blob) => download(blob, "lab.png")); byId("save").open = false; });
byId("python").addEventListener("click", async () => {
  try {
    byId("code").textContent = await (await post("script", { problem: problem(), methods: state.methods })).text();
    byId("program").showModal();
  } catch (error) { complain(error.message); }
});
byId("close-program").addEventListener("click", () => byId("program").close());
byId("copy-code").addEventListener("click", () => copy(byId("code").textContent, "Program"));
byId("save-code").addEventListener("click", () => download(byId("code").textContent, "lab.py", "text/x-python"));

/* --- light and dark, and the beginning --- */
const dark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme(chosen) {
  document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  readTheme();
  for (const slot of slots) if (slot.map) slot.map = { borders: slot.map.borders, border: slot.map.border };
  renderAll();
}
let chosenTheme = null;
try { chosenTheme = localStorage.getItem("knowable-lab-theme"); } catch { /* private */ }
byId("theme").addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("knowable-lab-theme", chosenTheme); } catch { /* private */ }
  applyTheme(chosenTheme);
});
dark.addEventListener("change", () => applyTheme(chosenTheme));
new ResizeObserver(renderAll).observe(byId("panels"));
addEventListener("hashchange", begin);
if (matchMedia("(max-width: 64rem)").matches) byId("controls").open = false;
function begin() {
  if (location.hash === encoded() && slots.length) return;
  const wrong = decode(location.hash);
  if (wrong === null || (wrong && !state.points.length)) choosePreset(LAB.presets[0].name);
  history_.length = 0;
  change({});
  if (wrong) complain(wrong);
}
applyTheme(chosenTheme);
buildControls();
begin();
