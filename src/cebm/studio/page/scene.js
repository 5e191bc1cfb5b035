// A plane with things in it: an observation that can be dragged in the studio, roll-outs in the report.
import { HUES, cross, css, dot, label, line } from "./draw.js";

// The two maps between the plane's units and pixels.
export function plan(width, height, { low, high, downwards }, room = 8) {
  const spans = [0, 1].map((axis) => high[axis] - low[axis]);
  const size = Math.min((width - 2 * room) / spans[0], (height - 2 * room) / spans[1]), x0 = (width - size * spans[0]) / 2, y0 = (height - size * spans[1]) / 2;
  return {
    size,
    to: ([x, y]) => [x0 + (x - low[0]) * size, y0 + (downwards ? y - low[1] : high[1] - y) * size],
    from: (px, py) => [low[0] + (px - x0) / size, downwards ? low[1] + (py - y0) / size : high[1] - (py - y0) / size],
    box: [x0, y0, size * spans[0], size * spans[1]],
  };
}

// `scene`: low, high, downwards, walls [[x, y, x, y]], discs [{ name, points, radius, grip, band, heavy }], paths
// [{ points, hue, width, dashed }], dots [{ at, hue, hollow, size }], aims [{ from, to }]; all in the plane's units.
export function drawScene({ pen, width, height }, scene, room = 8) {
  const { to, size, box } = plan(width, height, scene, room), hue = (name) => css(name);
  pen.strokeStyle = css(scene.edge || "--edge"); pen.lineWidth = scene.edge ? 2 : 1; pen.strokeRect(...box);
  pen.save(); pen.beginPath(); pen.rect(...box); pen.clip();
  for (const [x1, y1, x2, y2] of scene.walls || []) line(pen, [to([x1, y1]), to([x2, y2])], css("--ink"), 2);
  (scene.discs || []).forEach((disc, i) => drawDisc(pen, disc, hue(HUES[i % HUES.length]), to, size, box));
  for (const { points, hue: name, width: thick, dashed } of scene.paths || []) {
    pen.setLineDash(dashed ? [3, 3] : []); line(pen, points.map(to), hue(name), thick); pen.setLineDash([]);
  }
  for (const { from, to: end } of scene.aims || []) {
    const [x, y] = to(end);
    pen.setLineDash([2, 3]); line(pen, [to(from), [x, y]], css("--soft"), 1); pen.setLineDash([]);
    line(pen, [[x - 5, y], [x + 5, y]], css("--ink"), 2); line(pen, [[x, y - 5], [x, y + 5]], css("--ink"), 2);
  }
  for (const { at, hue: name, hollow, size: radius } of scene.dots || []) {
    const [x, y] = to(at);
    dot(pen, x, y, radius, css(hollow ? "--paper" : name), css(hollow ? name : "--paper"));
  }
  for (const place of scene.crosses || []) cross(pen, ...to(place), 5);
  pen.restore();
  (scene.discs || []).forEach((disc) => nameDisc(pen, disc, to, size, width));
}

function drawDisc(pen, { points, radius, grip, band, heavy }, hue, to, size, box) {
  for (const point of points) {
    const [x, y] = to(point), r = (radius || 0) * size;
    if (r) {
      pen.globalAlpha = 0.28; pen.fillStyle = hue;
      if (band) pen.fillRect(box[0], y - r, box[2], 2 * r); else { pen.beginPath(); pen.arc(x, y, r, 0, 2 * Math.PI); pen.fill(); }
      pen.globalAlpha = 1;
      if (!band) { pen.beginPath(); pen.arc(x, y, r, 0, 2 * Math.PI); pen.strokeStyle = hue; pen.lineWidth = 1.5; pen.stroke(); }
    }
    if (grip) dot(pen, x, y, heavy ? 6 : 4.5, hue, css("--ink"));
  }
}

function nameDisc(pen, { name, points, radius, grip, band }, to, size, width) {
  if (!name) return;
  const [x, y] = to(points[0]), r = (radius || 0) * size;
  pen.textBaseline = "middle";
  if (!grip) {
    // Above the place; in a small picture on it.
    const away = width < 220 || band ? 0 : r + 9;
    pen.textAlign = "center"; label(pen, name, band ? width - 14 : x, y - away < 8 ? y + away : y - away, css("--ink"), css("--paper"));
    return;
  }
  const right = x < width - 70;
  pen.textAlign = right ? "left" : "right";
  label(pen, name, x + (right ? 1 : -1) * Math.max(8, Math.min(r, 24) * 0.75 + 3), y - Math.max(8, Math.min(r, 24) * 0.75 + 3), css("--ink"), css("--paper"));
}

// The scene of an observation: what the task's sketch finds in it, and the chosen action where it is a place.
export function sceneOf(sketch, obs, action, held = -1) {
  const discs = sketch.handles.map(({ name, columns, radius }, i) => ({ name: held < 0 ? name : `${i + 1} ${name}`, points: columns.map(([x, y]) => [obs[x], obs[y]]), radius, grip: true, heavy: i === held }));
  return { ...sketch, discs, crosses: sketch.places && action ? [[action[0], action[1]]] : [] };
}
