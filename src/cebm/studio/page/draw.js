// Drawing on canvases: palettes, heat maps, axes.
import { number, unpack } from "./state.js";

const ANCHORS = {
  viridis: [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]],
  cividis: [[0, 34, 78], [33, 57, 110], [76, 85, 107], [103, 110, 114], [125, 124, 120], [152, 142, 117], [183, 165, 105], [217, 189, 82], [254, 232, 56]],
  difference: [[178, 88, 6], [224, 153, 60], [247, 215, 165], [245, 245, 245], [200, 200, 228], [140, 128, 188], [84, 39, 136]],
};

export function colour(palette, share) {
  const list = ANCHORS[palette], at = Math.min(1, Math.max(0, share)) * (list.length - 1), low = Math.min(list.length - 2, Math.floor(at));
  return list[low].map((value, i) => value + (at - low) * (list[low + 1][i] - value));
}

export function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// A canvas in its own pixels; coordinates are those of the page.
export function brush(canvas) {
  const ratio = window.devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(width * ratio)); canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = css("--back"); pen.fillRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

// Lowest energy, and what counts as the highest: the top hundredth shares a colour.
export function span(energies) {
  const known = Array.from(energies).filter(Number.isFinite).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const top = known[Math.floor(0.99 * (known.length - 1))];
  return [known[0], top > known[0] ? top : known[0] + 1];
}

export function heatMap(pen, frame, values, points, share, palette) {
  const image = new ImageData(points, points);
  for (let row = 0; row < points; row++) for (let column = 0; column < points; column++) {
    const [red, green, blue] = colour(palette, share(values[row * points + column]));
    image.data.set([red, green, blue, 255], 4 * ((points - 1 - row) * points + column));
  }
  const small = new OffscreenCanvas(points, points);
  small.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = points < 90;
  pen.drawImage(small, frame.x, frame.y, frame.width, frame.height);
}

export const energyShare = ([low, high]) => (value) => (Number.isFinite(value) ? Math.sqrt(Math.max(0, value - low) / (high - low)) : 1);

export function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const size = power * [1, 2, 5, 10].find((step) => step * power >= raw), found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + 1e-9 * size; value += size) found.push(Math.abs(value) < 1e-9 * size ? 0 : value);
  return found;
}

export function axes(pen, frame, across, up, names) {
  pen.strokeStyle = css("--line"); pen.fillStyle = css("--quiet"); pen.lineWidth = 1;
  pen.strokeRect(frame.x, frame.y, frame.width, frame.height);
  pen.textAlign = "center"; pen.textBaseline = "top";
  for (const value of ticks(...across, Math.max(2, frame.width / 70))) {
    const x = frame.x + ((value - across[0]) / (across[1] - across[0])) * frame.width;
    pen.beginPath(); pen.moveTo(x, frame.y + frame.height); pen.lineTo(x, frame.y + frame.height + 4); pen.stroke();
    pen.fillText(number(value), x, frame.y + frame.height + 5);
  }
  if (names[0]) pen.fillText(names[0], frame.x + frame.width / 2, frame.y + frame.height + 18);
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const value of ticks(...up, Math.max(2, frame.height / 50))) {
    const y = frame.y + frame.height - ((value - up[0]) / (up[1] - up[0])) * frame.height;
    pen.beginPath(); pen.moveTo(frame.x - 4, y); pen.lineTo(frame.x, y); pen.stroke();
    pen.fillText(number(value), frame.x - 6, y);
  }
  if (names[1]) { pen.save(); pen.translate(frame.x - 38, frame.y + frame.height / 2); pen.rotate(-Math.PI / 2); pen.textAlign = "center"; pen.fillText(names[1], 0, 0); pen.restore(); }
}

export function line(pen, points, style, width = 1.5) {
  pen.strokeStyle = style; pen.lineWidth = width; pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

export function dot(pen, x, y, radius, fill, edge) {
  pen.beginPath(); pen.arc(x, y, radius, 0, 2 * Math.PI); pen.fillStyle = fill; pen.fill();
  if (edge) { pen.strokeStyle = edge; pen.lineWidth = 1; pen.stroke(); }
}

// A cross that shows on every colour.
export function cross(pen, x, y, size = 8) {
  for (const [style, width] of [["#000", 5], ["#fff", 2]]) {
    line(pen, [[x - size, y - size], [x + size, y + size]], style, width);
    line(pen, [[x - size, y + size], [x + size, y - size]], style, width);
  }
}

export function ring(pen, x, y, radius) {
  for (const [style, width] of [["#000", 4], ["#fff", 2]]) {
    pen.beginPath(); pen.arc(x, y, radius, 0, 2 * Math.PI); pen.strokeStyle = style; pen.lineWidth = width; pen.stroke();
  }
}

// A small landscape with its chosen action, for the panels at the side.
export function thumbnail(canvas, drawn, about, palette, title, limits = null) {
  const { pen, width, height } = brush(canvas), values = unpack(drawn.energies), points = drawn.energies.shape[0];
  const frame = { x: 6, y: 18, width: width - 12, height: height - 24 };
  pen.fillStyle = css("--fore"); pen.textAlign = "left"; pen.textBaseline = "top"; pen.fillText(title, 6, 2);
  if (drawn.axes.length === 1) {
    const [low, high] = limits || span(values);
    line(pen, Array.from(values, (value, i) => [frame.x + ((i + 0.5) / points) * frame.width, frame.y + frame.height * (1 - Math.min(1, (value - low) / (high - low)))]), css("--accent"));
    pen.strokeStyle = css("--line"); pen.strokeRect(frame.x, frame.y, frame.width, frame.height);
    return;
  }
  const side = Math.min(frame.width, frame.height);
  frame.x += (frame.width - side) / 2; frame.width = frame.height = side;
  heatMap(pen, frame, values, points, energyShare(limits || span(values)), palette);
  const at = (axis) => (drawn.held[axis] / about.limit + 1) / 2;
  cross(pen, frame.x + at(drawn.axes[0]) * side, frame.y + (1 - at(drawn.axes[1])) * side, 5);
}
