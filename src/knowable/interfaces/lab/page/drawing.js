"use strict";
/* Drawing on a canvas or into SVG by the same few calls, and the part of a plane that is shown. */
const THEME = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "card", "ink", "soft", "line", "accent", "wash", "epistemic", "aleatoric", "mean", "judge", "grid", "c0", "c1", "c2"])
    THEME[name] = style.getPropertyValue("--" + name).trim();
}
function rgb(colour) {
  const whole = parseInt(colour.slice(1), 16);
  return [whole >> 16 & 255, whole >> 8 & 255, whole & 255];
}
const mixed = (a, b, share) => a.map((each, place) => each + (b[place] - each) * share);

class CanvasSurface {
  constructor(canvas, width, height, scale) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    this.context = canvas.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.width = width; this.height = height;
  }
  set({ alpha = 1 }) { this.context.globalAlpha = alpha; }
  path(places, { stroke, fill, width = 1, dash, alpha, close = false } = {}) {
    const c = this.context;
    if (!places.length) return;
    this.set({ alpha });
    c.beginPath();
    for (const [x, y, jump] of places) jump ? c.moveTo(x, y) : c.lineTo(x, y);
    if (close) c.closePath();
    if (fill) { c.fillStyle = fill; c.fill(); }
    if (stroke) { c.strokeStyle = stroke; c.lineWidth = width; c.lineJoin = c.lineCap = "round"; c.setLineDash(dash || []); c.stroke(); c.setLineDash([]); }
  }
  circle(x, y, radius, { fill, stroke, width = 1, alpha } = {}) {
    const c = this.context;
    this.set({ alpha });
    c.beginPath(); c.arc(x, y, radius, 0, 7);
    if (fill) { c.fillStyle = fill; c.fill(); }
    if (stroke) { c.strokeStyle = stroke; c.lineWidth = width; c.stroke(); }
  }
  rect(x, y, width, height, fill, alpha) { this.set({ alpha }); this.context.fillStyle = fill; this.context.fillRect(x, y, width, height); }
  text(words, x, y, { fill, size = 11, align = "left", weight = 400, alpha } = {}) {
    const c = this.context;
    this.set({ alpha });
    c.font = `${weight} ${size}px system-ui, sans-serif`; c.fillStyle = fill; c.textAlign = align; c.textBaseline = "alphabetic";
    c.fillText(words, x, y);
  }
  image(source, x, y, width, height) { this.set({}); this.context.imageSmoothingEnabled = true; this.context.imageSmoothingQuality = "high"; this.context.drawImage(source, x, y, width, height); }
  clipped(x, y, width, height, draw) {
    this.context.save(); this.context.beginPath(); this.context.rect(x, y, width, height); this.context.clip();
    draw(); this.context.restore();
  }
}

class SvgSurface {
  constructor(width, height) { this.width = width; this.height = height; this.parts = []; this.clips = 0; }
  static words(text) { return String(text).replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]); }
  look({ stroke, fill, width = 1, dash, alpha = 1 }) {
    return `fill="${fill || "none"}" ${stroke ? `stroke="${stroke}" stroke-width="${width}" stroke-linejoin="round" ` : ""}` +
      `${dash ? `stroke-dasharray="${dash.join(" ")}" ` : ""}${alpha < 1 ? `opacity="${alpha}"` : ""}`;
  }
  path(places, look = {}) {
    if (!places.length) return;
    const d = places.map(([x, y, jump], n) => `${jump || !n ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    this.parts.push(`<path d="${d}${look.close ? "Z" : ""}" ${this.look(look)}/>`);
  }
  circle(x, y, radius, look = {}) { this.parts.push(`<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${radius}" ${this.look(look)}/>`); }
  rect(x, y, width, height, fill, alpha = 1) { this.parts.push(`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${width.toFixed(1)}" height="${height.toFixed(1)}" fill="${fill}" opacity="${alpha}"/>`); }
  text(words, x, y, { fill, size = 11, align = "left", weight = 400, alpha = 1 } = {}) {
    const anchor = { left: "start", right: "end", center: "middle" }[align];
    this.parts.push(`<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" font-family="system-ui, sans-serif" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" fill="${fill}" opacity="${alpha}">${SvgSurface.words(words)}</text>`);
  }
  image(source, x, y, width, height) {
    this.parts.push(`<image x="${x}" y="${y}" width="${width}" height="${height}" preserveAspectRatio="none" href="${source.toDataURL()}"/>`);
  }
  clipped(x, y, width, height, draw) {
    const name = `clip${++SvgSurface.clips}`;
    this.parts.push(`<clipPath id="${name}"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath><g clip-path="url(#${name})">`);
    draw(); this.parts.push("</g>");
  }
  within(x, y, draw) { this.parts.push(`<g transform="translate(${x} ${y})">`); draw(); this.parts.push("</g>"); }
  document() { return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${this.width} ${this.height}" width="${this.width}" height="${this.height}">${this.parts.join("")}</svg>`; }
}
SvgSurface.clips = 0;

/* The frame of a plot: from numbers to places and back. */
class Frame {
  constructor(surface, view, margin = { left: 30, right: 8, top: 6, bottom: 20 }) {
    this.view = view; this.x0 = margin.left; this.y0 = margin.top;
    this.width = surface.width - margin.left - margin.right; this.height = surface.height - margin.top - margin.bottom;
    this.surface = surface;
  }
  x(value) { return this.x0 + this.width * (value - this.view[0]) / (this.view[1] - this.view[0]); }
  y(value) { return this.y0 + this.height * (1 - (value - this.view[2]) / (this.view[3] - this.view[2])); }
  back(x, y) {
    const v = this.view;
    return [v[0] + (v[1] - v[0]) * (x - this.x0) / this.width, v[2] + (v[3] - v[2]) * (1 - (y - this.y0) / this.height)];
  }
  inside(draw) { this.surface.clipped(this.x0, this.y0, this.width, this.height, draw); }
  axes({ x = true, y = true, lines = true } = {}) {
    const s = this.surface, [left, right, bottom, top] = this.view;
    if (x) for (const at of ticks(left, right, this.width / 70)) {
      if (lines) s.path([[this.x(at), this.y0, true], [this.x(at), this.y0 + this.height]], { stroke: THEME.grid });
      s.text(short(at), this.x(at), this.y0 + this.height + 14, { fill: THEME.soft, align: "center" });
    }
    if (y) for (const at of ticks(bottom, top, this.height / 45)) {
      if (lines) s.path([[this.x0, this.y(at), true], [this.x0 + this.width, this.y(at)]], { stroke: THEME.grid });
      s.text(short(at), this.x0 - 6, this.y(at) + 4, { fill: THEME.soft, align: "right" });
    }
  }
}
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(2, count), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step && found.length < 40; at += step) found.push(Math.abs(at) < 1e-9 * step ? 0 : at);
  return found;
}
function short(value) {
  const size = Math.abs(value);
  return (size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replace("-", "−");
}
/* Lines along which a grid of bytes is one half, by marching squares: [x, y, jump] in cells. */
function borders(grid, side) {
  const found = [], at = (i, j) => grid[j * side + i] / 255 - 0.5;
  const cross = (a, b) => a / (a - b);
  for (let j = 0; j + 1 < side; j++) for (let i = 0; i + 1 < side; i++) {
    const a = at(i, j), b = at(i + 1, j), c = at(i + 1, j + 1), d = at(i, j + 1), ends = [];
    if (a * b < 0) ends.push([i + cross(a, b), j]);
    if (b * c < 0) ends.push([i + 1, j + cross(b, c)]);
    if (d * c < 0) ends.push([i + cross(d, c), j + 1]);
    if (a * d < 0) ends.push([i, j + cross(a, d)]);
    for (let n = 0; n + 1 < ends.length; n += 2) found.push([...ends[n], true], [...ends[n + 1], false]);
  }
  return found;
}
function bytes(text) { const raw = atob(text), found = new Uint8Array(raw.length); for (let n = 0; n < raw.length; n++) found[n] = raw.charCodeAt(n); return found; }
