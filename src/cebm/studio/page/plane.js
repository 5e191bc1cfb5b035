// One landscape: energies as colours or as a curve, and on it marks, candidates and their histograms. The studio, the
// report and a page that was taken away all draw with this.
import { number, unpack } from "./numbers.js";
import { FONT, HUES, axes, brush, colour, cross, css, diamond, dot, energyShare, heatMap, label, line, ring, span, ticks, triangle } from "./draw.js";

const STRIP = 54, SCALE = [220, 30], CANDIDATE = "#ff9f1a", TRAIL = 3;

// What the server drew, with its numbers unpacked. `look`: palette, span (null: the picture's own), compact, signed.
export function picture(drawn, look) {
  return { marks: [], ...drawn, values: unpack(drawn.energies), points: drawn.energies.shape[0], density: drawn.density && unpack(drawn.density), ...look };
}

// Candidates on their way, unpacked.
export function journey(moves) {
  const [frames, count, dims] = moves.states.shape;
  return { ...moves, frames, count, dims, states: unpack(moves.states), energies: unpack(moves.energies), bars: (moves.shares || []).map(unpack), density: (moves.exact || []).map(unpack) };
}

const mix = (a, b, part) => (part > 1e-6 ? a + (b - a) * part : a);

// Places and energies of all candidates at a position of the way, which may lie between two frames.
export function standing(way, at) {
  const frame = Math.min(Math.floor(at + 1e-6), way.frames - 1), next = Math.min(frame + 1, way.frames - 1), part = at - frame;
  const place = (f, i) => Array.from(way.states.subarray((f * way.count + i) * way.dims, (f * way.count + i + 1) * way.dims));
  const now = Array.from({ length: way.count }, (_, i) => place(frame, i).map((value, k) => mix(value, place(next, i)[k], part)));
  const heights = now.map((_, i) => mix(way.energies[frame * way.count + i], way.energies[next * way.count + i], part));
  const trails = now.map((end, i) => [...Array.from({ length: Math.min(frame, TRAIL) + 1 }, (_, k) => place(Math.max(0, frame - TRAIL) + k, i)), end]);
  return { frame, now, heights, trails };
}

export function drawLandscape({ pen, width, height }, shown, way = null, at = 0) {
  const strip = way && way.bars.length && !shown.compact ? STRIP : 0, left = shown.compact ? 40 : 56;
  const frame = { x: left, y: 6 + strip, width: width - left - 8 - strip, height: height - strip - (shown.compact ? 28 : 46) };
  const state = way && standing(way, at);
  (shown.axes.length === 1 ? drawCurve : drawPlane)(pen, frame, shown, way, state);
}

const share = (shown, value) => (value / shown.limit + 1) / 2;
const named = (shown) => (shown.compact ? ["", ""] : shown.names);

function drawPlane(pen, frame, shown, way, state) {
  const side = Math.min(frame.width, frame.height);
  frame.x += (frame.width - side) / 2; frame.width = frame.height = side;
  pen.imageSmoothingEnabled = true;
  pen.drawImage(coloured(shown), frame.x, frame.y, side, side);
  axes(pen, frame, ...shown.scales, named(shown));
  const at = (x, y) => [frame.x + share(shown, x) * side, frame.y + (1 - share(shown, y)) * side];
  pen.save(); pen.beginPath(); pen.rect(frame.x, frame.y, side, side); pen.clip();
  for (const mark of shown.marks) drawMark(pen, shown, mark, at, side);
  if (state) {
    const size = Math.max(2.2, Math.min(3, side / 110));
    if (shown.compact) { pen.globalAlpha = 0.22; for (const trail of state.trails) line(pen, trail.map(([x, y]) => at(x, y)), "#fff", 1); pen.globalAlpha = 1; }
    state.now.forEach(([x, y], i) => i !== way.chosen && dot(pen, ...at(x, y), size, CANDIDATE, "#000000aa"));
    const [x, y] = state.now[way.chosen] || [];
    dot(pen, ...at(x, y), size, CANDIDATE, "#000"); ring(pen, ...at(x, y), size + 4);
  }
  nameMarks(pen, frame, shown, at, side);
  if (shown.held && (shown.crossed || !shown.compact)) cross(pen, ...at(...shown.held), shown.compact ? 5 : 8);
  pen.restore();
  if (!way || shown.compact) return;
  histogram(pen, { x: frame.x, y: frame.y - STRIP, width: side, height: STRIP - 6 }, way, state.frame, 0, false);
  histogram(pen, { x: frame.x + side + 6, y: frame.y, width: STRIP - 6, height: side }, way, state.frame, 1, true);
}

// The colours of a picture are computed once.
function coloured(shown) {
  const { palette, signed } = shown, key = `${palette} ${signed}`;
  if (shown.colouredAs !== key) {
    const share = signed ? (value) => 0.5 + value / signed / 2 : energyShare(shown.span || span(shown.values));
    Object.assign(shown, { image: heatMap(shown.values, shown.points, share, signed ? "difference" : palette), colouredAs: key });
  }
  return shown.image;
}

function drawMark(pen, shown, { kind, x, y, rx }, at, side) {
  const [px, py] = at(x, y);
  if (kind === "demonstrated") { triangle(pen, px, py); return; }
  if (kind === "agent") { diamond(pen, px, py); return; }
  pen.setLineDash([4, 3]); ring(pen, px, py, radiusOf(shown, rx, side)); pen.setLineDash([]);
}

const radiusOf = (shown, rx, side) => (rx ? Math.max(4, (rx / shown.limit / 2) * side) : 7);

// Names of places, above their rings, or below where there is no room; short in a small picture.
function nameMarks(pen, frame, shown, at, side) {
  pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = `600 12px ${FONT}`;
  for (const { kind, x, y, rx } of shown.marks) {
    if (kind === "demonstrated" || kind === "agent") continue;
    const [px, py] = at(x, y), away = radiusOf(shown, rx, side) + 10, words = shown.compact ? kind.replace(/^goal /, "") : kind;
    label(pen, words, px, py - away < frame.y + 8 ? py + away : py - away);
  }
  pen.font = `11px ${FONT}`;
}

function drawCurve(pen, frame, shown, way, state) {
  const { values, points, signed } = shown, [lowest, high] = signed ? [-signed, signed] : shown.span || span(values);
  const low = signed ? -signed : Math.min(lowest, shown.energy ?? lowest), top = high + 0.05 * (high - low), [from, to] = shown.places;
  const x = (value) => frame.x + share(shown, value) * frame.width, place = (i) => from + (i / (points - 1)) * (to - from);
  const y = (energy) => frame.y + frame.height * (1 - Math.min(1, (energy - low) / (top - low))), floor = frame.y + frame.height;
  if (shown.density) {
    const most = Math.max(...shown.density) || 1;
    pen.fillStyle = css("--line"); pen.beginPath(); pen.moveTo(frame.x, floor);
    shown.density.forEach((value, i) => pen.lineTo(x(place(i)), floor - (0.9 * frame.height * value) / most));
    pen.lineTo(frame.x + frame.width, floor); pen.closePath(); pen.fill();
  }
  line(pen, Array.from(values, (value, i) => [x(place(i)), y(Number.isFinite(value) ? value : top)]), css("--blue"), 2);
  axes(pen, frame, shown.scales[0], [low, top], shown.compact ? ["", ""] : [shown.names[0], signed ? "difference" : "energy"]);
  shown.marks.filter(({ kind }) => kind !== "agent").forEach((mark, i) => {
    pen.setLineDash(mark.kind === "demonstrated" ? [2, 3] : [6, 4]);
    line(pen, [[x(mark.x), frame.y], [x(mark.x), floor]], css(mark.kind === "demonstrated" ? "--ink" : HUES[i % HUES.length]), 1.5); pen.setLineDash([]);
    if (mark.kind === "demonstrated") return;
    pen.textAlign = "left"; pen.textBaseline = "top"; pen.fillStyle = css("--ink"); pen.fillText(mark.kind, x(mark.x) + 4, frame.y + 3);
  });
  if (state) {
    state.now.forEach(([value], i) => dot(pen, x(value), y(state.heights[i]), 2.6, CANDIDATE, "#000000aa"));
    ring(pen, x(state.now[way.chosen]?.[0]), y(state.heights[way.chosen]), 6);
  }
  if (shown.held && (shown.crossed || !shown.compact) && !signed) cross(pen, x(shown.held[0]), y(shown.energy ?? top), shown.compact ? 5 : 6);
  if (way && !shown.compact) histogram(pen, { x: frame.x, y: frame.y - STRIP, width: frame.width, height: STRIP - 6 }, way, state.frame, 0, false);
}

// The candidates' histogram as bars, the exact density as a line.
function histogram(pen, frame, way, at, axis, upright) {
  if (!way.bars[axis]) return;
  const bins = way.shares[axis].shape[1], bars = way.bars[axis].subarray(at * bins, (at + 1) * bins), exact = way.density[axis];
  const most = Math.max(1.6 * Math.max(...(exact || [0])), exact ? 0 : Math.max(...bars), 1e-9);
  const size = (value) => Math.min(1, value / most) * (upright ? frame.width : frame.height), along = (upright ? frame.height : frame.width) / bins;
  pen.fillStyle = css("--bars");
  bars.forEach((value, i) => {
    if (upright) pen.fillRect(frame.x, frame.y + frame.height - (i + 1) * along, size(value), along - 0.5);
    else pen.fillRect(frame.x + i * along, frame.y + frame.height - size(value), along - 0.5, size(value));
  });
  if (!exact) return;
  line(pen, Array.from(exact, (value, i) => {
    const place = (i + 0.5) / bins;
    return upright ? [frame.x + size(value), frame.y + frame.height * (1 - place)] : [frame.x + frame.width * place, frame.y + frame.height - size(value)];
  }), css("--ink"), 1.5);
}

// ---------------------------------------------------------------- words and keys
export function described(shown) {
  const [low, high] = shown.span || span(shown.values), over = shown.axes.map((_, i) => shown.names[i]).join(" and ");
  return `Energy over ${over}, from ${number(low)} to ${number(high)}. Chosen action ${shown.action.map((value) => number(value, 6)).join(", ")}.`;
}

// The colour scale: a canvas and where its labels are.
function drawScale({ pen, width }, shown) {
  const [low, high] = shown.span || span(shown.values), size = width - 24;
  for (let i = 0; i < size; i++) { pen.fillStyle = `rgb(${colour(shown.palette, i / size).map(Math.round).join(",")})`; pen.fillRect(12 + i, 1, 1.5, 11); }
  pen.fillStyle = css("--soft"); pen.textAlign = "center"; pen.textBaseline = "top";
  let taken = 12 + pen.measureText(number(low, 3)).width; // labels must not touch
  for (const value of ticks(low, high, 4)) {
    const at = 12 + size * energyShare([low, high])(value), words = number(value, 3), half = pen.measureText(words).width / 2;
    if (at - half < taken + 8) continue;
    pen.fillRect(at, 12, 1, 4); pen.fillText(words, at, 17); taken = at + half;
  }
  pen.fillRect(12, 12, 1, 4); pen.textAlign = "left"; pen.fillText(number(low, 3), 8, 17);
}

const ICONS = {
  cross: (pen) => cross(pen, 9, 8, 5),
  candidate: (pen) => dot(pen, 9, 8, 3, CANDIDATE, "#000000aa"),
  chosen: (pen) => { dot(pen, 9, 8, 2.5, CANDIDATE, "#000"); ring(pen, 9, 8, 6); },
  demonstrated: (pen) => triangle(pen, 9, 9, 6),
  agent: (pen) => diamond(pen, 9, 8, 5),
  place: (pen) => { pen.setLineDash([3, 2]); ring(pen, 9, 8, 5); pen.setLineDash([]); },
  bars: (pen) => { pen.fillStyle = css("--bars"); for (const [x, tall] of [[2, 5], [7, 11], [12, 7]]) pen.fillRect(x, 14 - tall, 4, tall); },
  line: (pen) => line(pen, [[0, 13], [4, 10], [9, 3], [14, 10], [18, 13]], css("--ink")),
  energy: (pen) => line(pen, [[0, 3], [6, 12], [11, 13], [18, 4]], css("--blue"), 2),
  density: (pen) => { pen.fillStyle = css("--line"); pen.fillRect(2, 4, 14, 10); },
};

// What the signs of a picture mean: [icon, words] each.
export function entries(shown, way) {
  const curve = shown.axes.length === 1, kinds = new Set(shown.marks.map(({ kind }) => kind)), found = [];
  if (curve) found.push(["energy", "energy"], ...(shown.density ? [["density", "density exp(−E)/Z"]] : []));
  if (!shown.compact) found.push(["cross", "action the policy chooses"]);
  if (way) {
    if (way.candidates > 1) found.push(["candidate", "candidate"]);
    found.push(["chosen", way.candidates > 1 ? "candidate that is chosen" : "the action"]);
  }
  if (way && way.bars.length && !shown.compact) found.push(["bars", "histogram of the candidates"], ...(way.density.length ? [["line", "density exp(−E)/Z"]] : []));
  if (kinds.has("demonstrated")) found.push([curve ? "line" : "demonstrated", curve ? "dotted: demonstrated action" : "demonstrated action"]);
  if (kinds.has("agent") && !curve) found.push(["agent", "agent"]);
  const others = [...kinds].filter((kind) => !["demonstrated", "agent"].includes(kind));
  if (others.length) found.push(["place", others.join(", ")]);
  return found;
}

export function fillLegend(element, shown, way) {
  const scale = shown.axes.length === 2, list = entries(shown, way), range = String(shown.span || span(shown.values));
  const key = JSON.stringify([list, scale, shown.palette, css("--paper")]);
  if (element.legend !== key) signs(element, shown, scale, list);
  // Most pictures differ in their numbers alone.
  if (scale && (element.legend !== key || element.range !== range)) drawScale(brush(element.scale, ...SCALE), shown);
  Object.assign(element, { legend: key, range });
}

function signs(element, shown, scale, list) {
  element.replaceChildren();
  const add = (width, height, draw, words) => {
    const item = document.createElement("span"), canvas = document.createElement("canvas"), text = document.createElement("span");
    item.className = "key"; canvas.className = "icon"; canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-hidden", "true"); text.textContent = words;
    item.append(canvas); item.append(text); element.append(item);
    draw(brush(canvas, width, height));
    return canvas;
  };
  if (scale) element.scale = add(...SCALE, () => {}, shown.compact ? "energy above the picture’s lowest; dark is likely" : "energy; dark is likely");
  for (const [icon, words] of list) add(18, 16, ({ pen }) => ICONS[icon](pen), words);
}
