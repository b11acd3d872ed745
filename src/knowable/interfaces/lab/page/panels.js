/* The panels: what is known of each method, and its picture. */
const slots = [];
let judge = null; // the slot of the judge, which has no panel of its own

function prepareSlots() {
  const wanted = [...state.methods.map((method) => [method, false]), ...(state.judge ? [[state.judge, true]] : [])];
  const old = [...slots];
  slots.length = 0;
  for (const [place, [method, isJudge]] of wanted.entries()) {
    const key = keyOf(method, isJudge);
    const at = old.findIndex((slot) => slot.key === key && !slot.failed);
    const slot = at >= 0 ? old.splice(at, 1)[0] : { key, method, data: null, state: "waiting", ended: false, error: "", trails: [], judged: null, extra: null };
    slot.place = isJudge ? "judge" : String(place);
    slot.isJudge = isJudge;
    slots.push(slot);
  }
  judge = slots.find((slot) => slot.isJudge) || null;
  for (const slot of slots) { if (slot.judgedBy !== judge?.key) slot.judged = null; if (slot.extra && slot.extra.key !== slot.key) slot.extra = null; }
  buildPanels();
  renderAll();
}
function take(found) {
  if (found.boot) { stream.boot = found.boot; return; }
  const slot = slots.find((each) => each.place === found.slot);
  if (!slot || slot.ended) return; // what has ended comes again when another method is chosen
  slot.state = found.state;
  if (found.error) { slot.error = found.error; slot.failed = slot.ended = true; slot.data = null; }
  else if (found.mean || found.probs) {
    slot.data = found; slot.error = ""; slot.map = null;
    const now = performance.now();
    slot.first ??= now - stream.asked; slot.count = (slot.count || 0) + 1;
    stream.pictures.push(now);
    if (stream.pictures.length > 500) stream.pictures.shift();
    for (const [n, path] of (found.chains?.paths || []).entries()) {
      const trail = slot.trails[n] ||= [];
      trail.push(...(found.chains.draws > 1 ? path.slice(-Math.max(1, found.chains.draws - (slot.seen || 0))) : path));
      if (trail.length > 14) trail.splice(0, trail.length - 14);
    }
    slot.seen = found.chains?.draws;
  }
  if (found.state === "done") { slot.ended = true; slot.seconds = found.seconds; compareWithJudge(); }
  slot.isJudge ? renderAll() : scheduleRender(slot);
}
function compareWithJudge() {
  if (!judge || judge.state !== "done") return;
  for (const slot of slots) if (!slot.isJudge && slot.state === "done" && slot.judgedBy !== judge.key) {
    const { key } = slot;
    slot.judgedBy = judge.key;
    post("act", { action: "judged", problem: problem(), method: slot.method, judge: state.judge }).then((answer) => answer.json())
      .then((found) => { if (slot.key === key) { slot.judged = found; scheduleRender(slot); } }).catch(() => {});
  }
}

/* --- the elements --- */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
let built = "";
function buildPanels() {
  const shape = JSON.stringify([state.methods, state.task]);
  if (shape === built) return;
  built = shape;
  const box = byId("panels");
  box.classList.toggle("one", state.methods.length === 1);
  box.replaceChildren(...state.methods.map((method, place) => {
    const select = make("select", { "aria-label": `Method ${place + 1}` });
    for (const [name, offer] of Object.entries(LAB.offers)) {
      const option = make("option", { value: name }, offer.label);
      option.selected = name === method; option.disabled = offer.linear && state.task === "classes";
      select.append(option);
    }
    select.addEventListener("change", () => change({ methods: state.methods.map((each, n) => n === place ? select.value : each) }));
    const drop = make("button", { class: "quiet drop", "aria-label": `Remove ${LAB.offers[method].label}`, title: "Remove this method" }, "✕");
    drop.hidden = state.methods.length === 1;
    drop.addEventListener("click", () => change({ methods: state.methods.filter((_, n) => n !== place) }));
    const canvas = make("canvas", { tabindex: "0", role: "img", "data-place": String(place) });
    listenTo(canvas, place);
    return make("article", { class: "card", "data-place": String(place) }, make("div", { class: "head" }, select, make("span", { class: "state" }), drop),
      make("div", { class: "meter" }, make("i")), canvas, make("p", { class: "note" }));
  }));
}
const cardOf = (slot) => byId("panels").children[Number(slot.place)];
const waitingRender = new Set();
function scheduleRender(slot) {
  if (!waitingRender.size) requestAnimationFrame(() => { for (const each of waitingRender) render(each); waitingRender.clear(); });
  waitingRender.add(slot);
}
function renderAll() { for (const slot of slots) if (!slot.isJudge) scheduleRender(slot); }

function render(slot) {
  const card = slot.isJudge ? null : cardOf(slot);
  if (!card || !slots.includes(slot)) return;
  const canvas = card.querySelector("canvas"), width = Math.max(220, card.clientWidth - 26);
  const height = Math.round(width * (state.task === "classes" && state.panel === "function" ? 0.72 : 0.6));
  canvas.style.height = `${height}px`;
  drawSlot(new CanvasSurface(canvas, width, height, window.devicePixelRatio || 1), slot);
  canvas.setAttribute("aria-label", wordsOf(slot));
  const { data } = slot, running = slot.state === "running" || slot.state === "waiting";
  card.querySelector(".meter i").style.width = slot.ended || !data ? "0" : `${100 * (data.share || 0)}%`;
  const time = !data ? "" : data.seconds < 0.1 ? `${Math.ceil(1000 * data.seconds)} ms` : `${data.seconds < 10 ? data.seconds.toFixed(1) : Math.round(data.seconds)} s`;
  card.querySelector(".state").textContent = slot.error ? "" : running ? (data ? `${data.text || "fitting"} · ${time}` : "…") : `done · ${time}`;
  const note = card.querySelector(".note");
  note.classList.toggle("bad", Boolean(slot.error));
  note.replaceChildren(...noteOf(slot));
}
function noteOf(slot) {
  if (slot.error) return [slot.error];
  const { data, judged, extra } = slot, found = [];
  const add = (text, kind) => { if (found.length) found.push(" · "); found.push(kind ? make("span", { class: kind }, text) : text); };
  if (!data) return [""];
  if (extra?.text) return [extra.text.replace(/(?<![\w-])-(?=\d)/g, "−")];
  if (judged?.sd_ratio !== undefined) add(`sd ${judged.sd_ratio.map(short).join(" to ")} × the judge’s, distance ${short(judged.wasserstein)} sd`, "judge");
  if (judged?.total_variation !== undefined) add(`total variation ${short(judged.total_variation)} from the judge`, "judge");
  const mixing = data.chains?.mixing;
  if (mixing) add(`R-hat ${mixing.rhat.toFixed(2)}, ESS ${Math.round(mixing.ess)}`);
  if (data.evidence) add(`log evidence ${short(data.evidence[0])} (${data.evidence[1]})`);
  if (data.noise && state.noise === null) add(`noise ${short(data.noise)}`);
  if (data.notes?.length) found.length < 2 ? add(data.notes[0].split(/(?<=[.:]) /)[0]) : 0;
  return found;
}
function wordsOf(slot) {
  const name = LAB.offers[slot.method].label;
  if (slot.error) return `${name}: ${slot.error}`;
  if (!slot.data) return `${name}: not there yet`;
  if (!slot.data.mean) return `${name}: map of ${state.layer} over ${used().length} points`;
  const widest = Math.max(...slot.data.epistemic), at = slot.data.epistemic.indexOf(widest);
  return `${name}: the epistemic standard deviation is largest, ${short(widest)}, at x = ${short(state.view[0] + (state.view[1] - state.view[0]) * at / (LAB.curve - 1))}`;
}

/* --- pictures --- */
function drawSlot(surface, slot) {
  surface.rect(0, 0, surface.width, surface.height, THEME.card);
  const panel = state.panel;
  if (panel === "weights") return drawWeights(surface, slot);
  if (panel === "terms") return drawTerms(surface, slot);
  if (panel === "chains") return drawChains(surface, slot);
  return state.task === "classes" ? drawMap(surface, slot) : drawCurve(surface, slot);
}
function empty(surface, lines) {
  lines.forEach((line, n) => surface.text(line, surface.width / 2, surface.height / 2 + 18 * (n - (lines.length - 1) / 2), { fill: THEME.soft, size: 13, align: "center" }));
}
function drawCurve(surface, slot) {
  const frame = new Frame(surface, state.view), { data } = slot;
  frame.axes();
  frame.inside(() => {
    if (data) {
      const at = data.mean.map((_, n) => frame.x(state.view[0] + (state.view[1] - state.view[0]) * n / (data.mean.length - 1)));
      const band = (half) => [...at.map((x, n) => [x, frame.y(data.mean[n] + half(n))]), ...at.map((x, n) => [x, frame.y(data.mean[n] - half(n))]).reverse()];
      const total = (n) => 2 * Math.hypot(data.epistemic[n], data.aleatoric[n]);
      surface.path(band(total), { fill: THEME.aleatoric, alpha: 0.34, close: true });
      surface.path(band((n) => 2 * data.epistemic[n]), { fill: THEME.card, close: true });
      surface.path(band((n) => 2 * data.epistemic[n]), { fill: THEME.epistemic, alpha: 0.36, close: true });
      for (const draw of data.draws) surface.path(draw.map((y, n) => [at[n], frame.y(y)]), { stroke: THEME.epistemic, width: 1, alpha: 0.55 });
      if (slot.extra?.low) for (const end of ["low", "high"]) surface.path(slot.extra[end].map((y, n) => [at[n], frame.y(y)]), { stroke: THEME.ink, width: 1.2, dash: [5, 4], alpha: 0.7 });
      if (slot.extra?.curve) surface.path(slot.extra.curve.map((y, n) => [at[n], frame.y(y)]), { stroke: THEME.c1, width: 1.6, dash: [6, 4] });
      surface.path(data.mean.map((y, n) => [at[n], frame.y(y)]), { stroke: THEME.mean, width: 2 });
      if (judge?.data?.mean && judge.data.mean.length === data.mean.length) for (const sign of [-2, 2])
        surface.path(judge.data.mean.map((y, n) => [at[n], frame.y(y + sign * judge.data.epistemic[n])]), { stroke: THEME.judge, width: 1.4, dash: [4, 4] });
      if (slot.extra?.accept) hatchCurve(surface, frame, slot.extra.accept);
    }
    drawPoints(surface, frame, slot);
    drawExtra(surface, frame, slot);
  });
}
function hatchCurve(surface, frame, accept) {
  const wide = frame.width / (accept.length - 1);
  for (let n = 0; n < accept.length; n++) if (accept[n] === "0") surface.rect(frame.x0 + (n - 0.5) * wide, frame.y0, wide + 0.5, frame.height, THEME.soft, 0.26);
}
function drawMap(surface, slot) {
  const frame = new Frame(surface, state.view), { data } = slot;
  frame.axes({ lines: false });
  frame.inside(() => {
    if (data) {
      slot.map ??= {};
      const name = state.layer + THEME.card;
      surface.image(slot.map[name] ??= mapImage(data), frame.x0, frame.y0, frame.width, frame.height);
      const place = ([i, j, jump]) => [frame.x0 + frame.width * i / (LAB.map - 1), frame.y0 + frame.height * (1 - j / (LAB.map - 1)), jump];
      slot.map.borders ??= data.draws.map((draw) => draw.map((grid) => borders(bytes(grid), LAB.map)));
      for (const draw of slot.map.borders) for (const lines of draw) surface.path(lines.map(place), { stroke: THEME.ink, width: 1, alpha: 0.34 });
      if (judge?.data?.draws && judge.data.probs?.length === 2) {
        judge.map ??= {};
        judge.map.border ??= borders(bytes(judge.data.probs[1]), LAB.map);
        surface.path(judge.map.border.map(place), { stroke: THEME.judge, width: 2, dash: [5, 4] });
      }
      if (slot.extra?.accept) hatchMap(surface, frame, slot.extra.accept);
    } else surface.rect(frame.x0, frame.y0, frame.width, frame.height, THEME.wash, 0.5);
    drawPoints(surface, frame, slot);
    drawExtra(surface, frame, slot);
  });
}
function mapImage(data) {
  const side = LAB.map, canvas = document.createElement("canvas"), context = (canvas.width = canvas.height = side, canvas.getContext("2d"));
  const image = context.createImageData(side, side), paper = rgb(THEME.card), colours = ["c0", "c1", "c2"].map((name) => rgb(THEME[name]));
  const layers = state.layer === "probability" ? data.probs.map(bytes) : [bytes(data[state.layer])];
  const ink = rgb(state.layer === "aleatoric" ? THEME.aleatoric : THEME.epistemic);
  for (let j = 0; j < side; j++) for (let i = 0; i < side; i++) {
    const from = j * side + i, to = 4 * ((side - 1 - j) * side + i);
    let colour;
    if (state.layer === "probability") {
      const shares = layers.map((layer) => layer[from] / 255), sum = shares.reduce((a, b) => a + b, 0) || 1;
      const sure = (Math.max(...shares) / sum - 1 / shares.length) / (1 - 1 / shares.length);
      const blend = [0, 1, 2].map((k) => shares.reduce((total, share, c) => total + share * colours[c][k], 0) / sum);
      colour = mixed(paper, blend, 0.12 + 0.58 * Math.max(0, sure));
    } else colour = mixed(paper, ink, Math.min(1, layers[0][from] / 255 * 0.98));
    image.data.set([...colour, 255], to);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
function hatchMap(surface, frame, accept) {
  const wide = frame.width / (LAB.map - 1), high = frame.height / (LAB.map - 1), lines = [];
  for (let j = 0; j < LAB.map; j++) for (let i = 0; i < LAB.map; i++) if (accept[j * LAB.map + i] === "0") {
    const x = frame.x0 + i * wide, y = frame.y0 + frame.height - j * high;
    surface.rect(x - wide / 2, y - high / 2, wide + 0.4, high + 0.4, THEME.card, 0.55);
    if ((i + j) % 2 === 0) lines.push([x - wide / 2, y + high / 2, true], [x + wide / 2, y - high / 2]);
  }
  surface.path(lines, { stroke: THEME.ink, width: 1, alpha: 0.5 });
}
function drawPoints(surface, frame, slot) {
  const count = used().length, held = new Set(slot.extra?.held || []);
  for (const [n, point] of state.points.entries()) {
    const colour = state.task === "classes" ? THEME[`c${point[2]}`] : THEME.ink, x = frame.x(point[0]), y = frame.y(point[1]);
    if (n >= count) surface.circle(x, y, 2.4, { stroke: THEME.soft, alpha: 0.4 });
    else if (held.has(n)) surface.circle(x, y, 3.4, { stroke: colour, fill: THEME.card, width: 1.6 });
    else surface.circle(x, y, state.task === "classes" ? 4 : 3.2, { fill: colour, stroke: THEME.card, width: 1.2 });
  }
}
function drawExtra(surface, frame, slot) {
  const { extra } = slot;
  if (extra?.point) {
    const x = frame.x(extra.point[0]);
    if (state.task === "classes" || extra.point.length > 1) {
      const y = frame.y(extra.point[1]);
      surface.circle(x, y, 8, { stroke: THEME.card, width: 5 }); surface.circle(x, y, 8, { stroke: THEME.ink, width: 2 }); surface.circle(x, y, 2, { fill: THEME.ink });
    } else {
      surface.path([[x, frame.y0, true], [x, frame.y0 + frame.height]], { stroke: THEME.ink, width: 1.5, dash: [3, 4] });
      surface.path([[x - 6, frame.y0, true], [x + 6, frame.y0], [x, frame.y0 + 9]], { fill: THEME.ink, close: true });
    }
  }
  if (extra?.to) {
    const line = state.task === "classes" ? [extra.from, extra.to] : [[extra.from[0], extra.at], [extra.to[0], extra.at]];
    const [a, b] = line.map(([x, y]) => [frame.x(x), frame.y(y)]), angle = Math.atan2(b[1] - a[1], b[0] - a[0]);
    if (state.task === "classes") {
      const wide = Math.abs(frame.x(extra.epsilon) - frame.x(0)), high = Math.abs(frame.y(extra.epsilon) - frame.y(0)), ring = [];
      for (let n = 0; n <= 48; n++) ring.push([a[0] + wide * Math.cos(n * Math.PI / 24), a[1] + high * Math.sin(n * Math.PI / 24)]);
      surface.path(ring, { stroke: THEME.ink, dash: [3, 3], alpha: 0.7 });
    }
    const head = [2.6, -2.6].map((turn) => [b[0] + 9 * Math.cos(angle + turn), b[1] + 9 * Math.sin(angle + turn)]);
    for (const [stroke, width] of [[THEME.card, 5], [THEME.ink, 2.2]]) surface.path([[...a, true], b, [...head[0], true], b, head[1]], { stroke, width });
    surface.circle(...a, 5, { stroke: THEME.ink, width: 2 });
  }
  if (cursor.shown && cursor.place === Number(slot.place)) {
    const x = frame.x(cursor.x), y = frame.y(cursor.y);
    surface.path([[x - 12, y, true], [x + 12, y], [x, y - 12, true], [x, y + 12]], { stroke: THEME.accent, width: 1.6 });
  }
}

/* --- weights, terms, chains --- */
function drawWeights(surface, slot) {
  const weights = slot.data?.weights;
  if (!weights) return empty(surface, slot.data ? ["A distribution over functions:", "there are no weights."] : ["…"]);
  const bars = weights.layers.flatMap((layer) => layer.quantiles), gap = 1.2, count = bars.length + gap * weights.layers.length;
  const inputs = (name) => !state.by_width || name.endsWith("bias") ? 1 : name.startsWith("0.") ? (state.task === "classes" ? 2 : 1) : state.width;
  const sizes = bars.flatMap((each) => [Math.abs(each[0]), Math.abs(each[4])]).sort((a, b) => a - b);
  const most = Math.max(2.2 * state.prior / (state.by_width ? Math.sqrt(state.width) : 1), 1.1 * sizes[Math.floor(0.98 * (sizes.length - 1))]);
  const frame = new Frame(surface, [0, count, -most, most], { left: 34, right: 6, top: 8, bottom: 20 });
  frame.axes({ x: false });
  let at = gap / 2;
  const step = frame.width / count;
  for (const layer of weights.layers) {
    const wide = layer.quantiles.length, scale = 2 * state.prior / Math.sqrt(inputs(layer.name));
    const left = frame.x(at - 0.35), right = frame.x(at + wide - 0.65);
    surface.rect(left, frame.y(scale), right - left, frame.y(-scale) - frame.y(scale), THEME.wash);
    const name = `${layer.name.endsWith("bias") ? "biases" : "weights"} ${1 + (Number.parseInt(layer.name) >> 1)}`;
    if ((right - left) > 6.2 * name.length) surface.text(name, (left + right) / 2, surface.height - 6, { fill: THEME.soft, align: "center", size: 10.5 });
    frame.inside(() => layer.quantiles.forEach((q, n) => {
      const x = frame.x(at + n), colour = layer.name.endsWith("bias") ? THEME.aleatoric : THEME.epistemic;
      surface.path([[x, frame.y(q[0]), true], [x, frame.y(q[4])]], { stroke: colour, width: Math.max(1, Math.min(2, step * 0.25)), alpha: 0.75 });
      surface.path([[x, frame.y(q[1]), true], [x, frame.y(q[3])]], { stroke: colour, width: Math.max(2, Math.min(6, step * 0.6)) });
      surface.circle(x, frame.y(q[2]), Math.max(1, Math.min(2.2, step * 0.25)), { fill: THEME.mean });
    }));
    at += wide + gap;
  }
}
const NAMES = { expected_log_likelihood: "E log p(D | θ)", kl: "KL(q ‖ p)", log_likelihood: "log p(D | θ)", log_prior: "log p(θ)" };
function drawTerms(surface, slot) {
  const terms = slot.data?.terms, history = slot.data?.chains?.history;
  if (slot.data?.chains && history?.length > 1) return drawMixing(surface, history);
  if (!terms || terms.rows.length < 2) return empty(surface, !slot.data || !slot.ended ? ["…"] : slot.data.evidence && !terms ? ["Solved in closed form:", `log evidence ${short(slot.data.evidence[0])}`] : ["No terms: there is nothing to be trained."]);
  const rows = terms.rows, values = rows.flatMap((row) => row.slice(1)).sort((a, b) => a - b), pick = (share) => values[Math.floor(share * (values.length - 1))];
  const late = rows.slice(Math.floor(rows.length / 4)).flatMap((row) => row.slice(1));
  const low = Math.min(...late, pick(0.12)), high = Math.max(...late, pick(0.88)), extra = 0.08 * (high - low || 1);
  const frame = new Frame(surface, [rows[0][0], rows.at(-1)[0], low - extra, high + extra], { left: 44, right: 108, top: 10, bottom: 20 });
  frame.axes();
  const series = [[1, NAMES[terms.names[0]], THEME.c1], [2, NAMES[terms.names[1]], THEME.judge], [3, terms.names[1] === "kl" ? "ELBO" : "log joint", THEME.epistemic]];
  frame.inside(() => { for (const [place, , colour] of series) surface.path(rows.map((row) => [frame.x(row[0]), frame.y(row[place])]), { stroke: colour, width: place === 3 ? 2.4 : 1.6 }); });
  const ends = series.map(([place, name, colour]) => ({ y: frame.y(rows.at(-1)[place]), name, colour, value: rows.at(-1)[place] })).sort((a, b) => a.y - b.y);
  ends.forEach((each, n) => { if (n && each.y - ends[n - 1].y < 27) each.y = ends[n - 1].y + 27; });
  const over = Math.max(0, ends.at(-1).y + 14 - surface.height);
  for (const each of ends) {
    surface.text(each.name, surface.width - 102, each.y - over, { fill: each.colour, size: 11, weight: 600 });
    surface.text(short(each.value), surface.width - 102, each.y + 12 - over, { fill: THEME.soft, size: 11 });
  }
}
function drawMixing(surface, history) {
  const half = surface.height / 2, draws = [history[0][0], history.at(-1)[0]];
  const parts = [[1, "R-hat of the function", 1.01, Math.max(1.06, ...history.map((row) => Math.min(2, row[1])))], [2, "effective sample size", 400, Math.max(440, ...history.map((row) => row[2]))]];
  parts.forEach(([place, name, goal, top], n) => {
    const frame = new Frame(surface, [draws[0], Math.max(draws[1], draws[0] + 1), place === 1 ? 0.995 : 0, top * (place === 1 ? 1.01 : 1.05)], { left: 44, right: 10, top: 10 + n * half, bottom: n ? 20 : half + 12 });
    frame.axes({ x: n === 1 });
    surface.path([[frame.x0, frame.y(goal), true], [frame.x0 + frame.width, frame.y(goal)]], { stroke: THEME.judge, dash: [4, 4], width: 1.3 });
    frame.inside(() => surface.path(history.map((row) => [frame.x(row[0]), frame.y(row[place])]), { stroke: THEME.epistemic, width: 2.2 }));
    surface.text(`${name}: ${short(history.at(-1)[place])}`, surface.width - 14, frame.y0 + 13, { fill: THEME.ink, align: "right", weight: 600 });
  });
}
const CHAIN_COLOURS = ["#2f86a3", "#d07517", "#71933a", "#a03e72", "#7a6bc4", "#c2504a", "#3f9f87", "#8d8d3a"];
function drawChains(surface, slot) {
  const weights = slot.data?.weights, chains = slot.data?.chains;
  if (!weights) return empty(surface, slot.data ? ["A distribution over functions:", "there are no weights."] : ["…"]);
  const places = [...weights.cloud, ...(chains?.cloud.flat() || []), ...slot.trails.flat()];
  const range = (n) => { const all = places.map((each) => each[n]).sort((a, b) => a - b), low = all[Math.floor(0.01 * all.length)], high = all[Math.ceil(0.99 * (all.length - 1))], more = 0.14 * (high - low) + 0.3; return [low - more, high + more]; };
  const frame = new Frame(surface, [...range(0), ...range(1)], { left: 34, right: 8, top: 8, bottom: 34 });
  frame.axes();
  const alone = weights.slice[0][0] === weights.slice[1][0];
  const nice = ([name, place]) => `${place ? "second" : "first"} weight${alone ? "" : ` of layer ${1 + (Number.parseInt(name) >> 1)}`}`;
  surface.text(`${nice(weights.slice[0])} →`, surface.width - 10, surface.height - 5, { fill: THEME.soft, align: "right", size: 10.5 });
  surface.text(`↑ ${nice(weights.slice[1])}`, frame.x0 + 5, frame.y0 + 12, { fill: THEME.soft, size: 10.5 });
  frame.inside(() => {
    if (!chains) for (const [x, y] of weights.cloud) surface.circle(frame.x(x), frame.y(y), 2.3, { fill: THEME.epistemic, alpha: 0.5 });
    (chains?.cloud || []).forEach((cloud, n) => { for (const [x, y] of cloud) surface.circle(frame.x(x), frame.y(y), 1.8, { fill: CHAIN_COLOURS[n % 8], alpha: 0.4 }); });
    slot.trails.forEach((trail, n) => {
      for (let k = 1; k < trail.length; k++) surface.path([[frame.x(trail[k - 1][0]), frame.y(trail[k - 1][1]), true], [frame.x(trail[k][0]), frame.y(trail[k][1])]], { stroke: CHAIN_COLOURS[n % 8], width: 1.3, alpha: (slot.ended ? 0.4 : 0.85) * k / trail.length });
      if (trail.length) surface.circle(frame.x(trail.at(-1)[0]), frame.y(trail.at(-1)[1]), 4.4, { fill: CHAIN_COLOURS[n % 8], stroke: THEME.card, width: 1.5 });
    });
  });
}
