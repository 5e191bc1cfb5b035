// Drawing: canvases that follow their size and the page's colours, palettes, heat maps, axes. It knows no page.
import { number } from "./numbers.js";
import { SvgPen } from "./svg.js";

const ANCHORS = {
  viridis: [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]],
  cividis: [[0, 34, 78], [33, 57, 110], [76, 85, 107], [103, 110, 114], [125, 124, 120], [152, 142, 117], [183, 165, 105], [217, 189, 82], [254, 232, 56]],
  difference: [[178, 88, 6], [224, 153, 60], [247, 215, 165], [245, 245, 245], [200, 200, 228], [140, 128, 188], [84, 39, 136]],
};
export const PALETTES = ["viridis", "cividis"];
export const FONT = "system-ui, sans-serif";
export const HUES = ["--orange", "--green", "--blue", "--purple", "--vermillion"];

export function colour(palette, share) {
  const list = ANCHORS[palette], at = Math.min(1, Math.max(0, share)) * (list.length - 1), low = Math.min(list.length - 2, Math.floor(at));
  return list[low].map((value, i) => value + (at - low) * (list[low + 1][i] - value));
}

export function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// ---------------------------------------------------------------- canvases
const painted = new Map();
let sharper = 1;
const watch = new ResizeObserver((entries) => { for (const { target } of entries) repaint(target); });

// Draws on a canvas, now and whenever its size or the colours change. `draw` gets { pen, width, height } in units of the page.
export function paint(canvas, draw) {
  if (!painted.has(canvas)) watch.observe(canvas);
  painted.set(canvas, draw);
  repaint(canvas);
}

function repaint(canvas) {
  if (!canvas.isConnected) { painted.delete(canvas); watch.unobserve(canvas); return; }
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !height) return;
  painted.get(canvas)?.(brush(canvas, width, height));
  canvas.dataset.drawn = "1";
}

export function repaintAll() { for (const canvas of [...painted.keys()]) repaint(canvas); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);

// Paper is light, and finer than a screen.
function printing(begins) { sharper = begins ? 3 : 1; document.documentElement.classList.toggle("paper", begins); repaintAll(); }
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

export function brush(canvas, width, height) {
  const ratio = Math.max(window.devicePixelRatio || 1, sharper);
  canvas.width = Math.max(1, Math.round(width * ratio)); canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ready(pen, width, height);
}

function ready(pen, width, height) {
  pen.fillStyle = css("--paper"); pen.fillRect(0, 0, width, height);
  pen.font = `11px ${FONT}`;
  return { pen, width, height };
}

// The same picture as SVG; null where nothing was drawn yet.
export function asSvg(canvas) {
  const { width, height } = canvas.getBoundingClientRect(), draw = painted.get(canvas);
  if (!draw || !width || !height) return null;
  const pen = new SvgPen(width, height);
  draw(ready(pen, width, height));
  return pen.text();
}

// ---------------------------------------------------------------- forms
// Lowest energy, and what counts as the highest: the top hundredth shares a colour. Sorted once for each picture.
const spans = new WeakMap();
export function span(energies) {
  if (!spans.has(energies)) {
    const known = Float32Array.from(energies).filter(Number.isFinite).sort(), top = known[Math.floor(0.99 * (known.length - 1))];
    spans.set(energies, known.length ? [known[0], top > known[0] ? top : known[0] + 1] : [0, 1]);
  }
  return spans.get(energies);
}

// The colours of a palette as pixels, so that a picture needs no arithmetic for each of its points.
const SHADES = 1023, pixels = new Map();
function pixelsOf(palette) {
  if (!pixels.has(palette)) {
    const bytes = new Uint8ClampedArray(4 * (SHADES + 1));
    for (let i = 0; i <= SHADES; i++) bytes.set([...colour(palette, i / SHADES), 255], 4 * i);
    pixels.set(palette, new Uint32Array(bytes.buffer));
  }
  return pixels.get(palette);
}

// A small canvas with a colour for every value; rows go up.
export function heatMap(values, points, share, palette) {
  const small = Object.assign(document.createElement("canvas"), { width: points, height: points });
  const pen = small.getContext("2d"), image = pen.createImageData(points, points);
  const shades = pixelsOf(palette), out = new Uint32Array(image.data.buffer);
  for (let row = 0; row < points; row++) for (let column = 0; column < points; column++) {
    const part = Math.min(1, Math.max(0, share(values[row * points + column])));
    out[(points - 1 - row) * points + column] = shades[Math.round(part * SHADES) || 0];
  }
  pen.putImageData(image, 0, 0);
  return small;
}

// A root scale keeps the valleys apart.
export const energyShare = ([low, high]) => (value) => (Number.isFinite(value) ? Math.sqrt(Math.max(0, value - low) / (high - low)) : 1);

export function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const size = power * [1, 2, 5, 10].find((step) => step * power >= raw * (1 - 1e-9)), found = [];
  for (let value = Math.ceil(low / size - 1e-9) * size; value <= high + 1e-9 * size; value += size) found.push(Math.abs(value) < 1e-9 * size ? 0 : value);
  return found;
}

export function axes(pen, frame, across, up, names) {
  pen.strokeStyle = css("--axis"); pen.fillStyle = css("--soft"); pen.lineWidth = 1;
  pen.strokeRect(frame.x, frame.y, frame.width, frame.height);
  pen.textAlign = "center"; pen.textBaseline = "top";
  for (const value of ticks(...across, Math.max(2, frame.width / 70))) {
    const x = frame.x + ((value - across[0]) / (across[1] - across[0])) * frame.width;
    line(pen, [[x, frame.y + frame.height], [x, frame.y + frame.height + 4]], css("--axis"), 1);
    pen.fillText(number(value), x, frame.y + frame.height + 6);
  }
  if (names[0]) pen.fillText(names[0], frame.x + frame.width / 2, frame.y + frame.height + 19);
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const value of ticks(...up, Math.max(2, frame.height / 50))) {
    const y = frame.y + frame.height - ((value - up[0]) / (up[1] - up[0])) * frame.height;
    line(pen, [[frame.x - 4, y], [frame.x, y]], css("--axis"), 1);
    pen.fillText(number(value), frame.x - 6, y);
  }
  if (names[1]) { pen.save(); pen.translate(frame.x - 40, frame.y + frame.height / 2); pen.rotate(-Math.PI / 2); pen.textAlign = "center"; pen.fillText(names[1], 0, 0); pen.restore(); }
}

export function line(pen, points, style, width = 1.5) {
  pen.strokeStyle = style; pen.lineWidth = width; pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

export function dot(pen, x, y, radius, fill, edge) {
  if (!Number.isFinite(x + y)) return;
  pen.beginPath(); pen.arc(x, y, radius, 0, 2 * Math.PI); pen.fillStyle = fill; pen.fill();
  if (edge) { pen.strokeStyle = edge; pen.lineWidth = 1; pen.stroke(); }
}

// Twice, dark and then white, so that it shows on every colour.
function both(act, widths = [5, 2]) { act("#000", widths[0]); act("#fff", widths[1]); }

export function cross(pen, x, y, size = 8) {
  both((style, width) => {
    line(pen, [[x - size, y - size], [x + size, y + size]], style, width);
    line(pen, [[x - size, y + size], [x + size, y - size]], style, width);
  });
}

export function ring(pen, x, y, radius) {
  if (!Number.isFinite(x + y)) return;
  both((style, width) => { pen.beginPath(); pen.arc(x, y, radius, 0, 2 * Math.PI); pen.strokeStyle = style; pen.lineWidth = width; pen.stroke(); }, [4, 2]);
}

export function triangle(pen, x, y, size = 8) {
  const corners = [[0, -1], [0.9, 0.7], [-0.9, 0.7], [0, -1], [0.9, 0.7]].map(([dx, dy]) => [x + dx * size, y + dy * size]);
  both((style, width) => line(pen, corners, style, width));
}

export function diamond(pen, x, y, size = 7) {
  const corners = [[0, -1], [1, 0], [0, 1], [-1, 0]].map(([dx, dy]) => [x + dx * size, y + dy * size]);
  pen.beginPath(); corners.forEach(([px, py], i) => (i ? pen.lineTo(px, py) : pen.moveTo(px, py))); pen.closePath();
  pen.fillStyle = "#fff"; pen.fill(); pen.strokeStyle = "#000"; pen.lineWidth = 2; pen.stroke();
}

// Words that show on every colour.
export function label(pen, text, x, y, fill = "#fff", edge = "#000") {
  pen.lineWidth = 3; pen.strokeStyle = edge; pen.strokeText(text, x, y); pen.fillStyle = fill; pen.fillText(text, x, y);
}
