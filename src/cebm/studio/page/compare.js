// Two policies at the same observation.
import { ask, change, element, facts, later, latest, listen, number, subject, unpack, view } from "./state.js";
import { brush, css, heatMap, line, thumbnail } from "./draw.js";

export const compared = { python: "" };

const run = latest(async (newer) => {
  if (view.tab !== "compare" || view.other === null) return;
  const found = await ask("compare", { subject: view.subject, other: view.other, obs: view.obs, axes: view.axes, points: 64 });
  if (newer()) return;
  compared.python = found.python;
  const other = facts.subjects[view.other];
  // The cross of the other policy is at its own choice in the first one's units only where both have the same units.
  thumbnail(element("second"), found.second, other, view.palette, `Energy of ${other.name}`);
  difference(found);
  const choices = [found.first.action, found.second.action].map((action) => action.map((value) => number(value, 6)).join(", "));
  element("compared").textContent = `${subject().name} chooses ${choices[0]}; ${other.name} chooses ${choices[1]}. Total variation distance of the two densities on this picture: ${number(found.distance, 6)}.`;
  element("compared").dataset.ready = String(Number(element("compared").dataset.ready || 0) + 1);
});

function difference(found) {
  const { pen, width, height } = brush(element("difference")), values = unpack(found.difference), points = found.difference.shape[0];
  const most = Math.max(1e-9, ...Array.from(values, Math.abs)), top = Math.min(most, 10);
  pen.fillStyle = css("--fore"); pen.textBaseline = "top"; pen.textAlign = "left";
  pen.fillText(`log density: purple ${subject().name}, orange the other (±${number(top, 2)})`, 6, 2);
  const side = Math.min(width - 12, height - 24), frame = { x: (width - side) / 2, y: 18, width: side, height: side };
  if (found.difference.shape.length === 2) heatMap(pen, frame, values, points, (value) => 0.5 + value / top / 2, "difference");
  else line(pen, Array.from(values, (value, i) => [6 + ((i + 0.5) / points) * (width - 12), 18 + (height - 24) * (0.5 - Math.max(-1, Math.min(1, value / top)) / 2)]), css("--accent"));
}

export function start() {
  element("other").onchange = () => change({ other: Number(element("other").value) });
  listen(["subject"], () => {
    const others = subject().comparable.filter((i) => i !== view.subject);
    element("other").replaceChildren(...others.map((i) => new Option(facts.subjects[i].name, i)));
    view.other = others.includes(view.other) ? view.other : others[0] ?? null;
    element("other").value = view.other ?? "";
    element("compared").textContent = others.length ? "" : "Name a second policy with the same columns: cebm studio RUN OTHER.";
    for (const id of ["second", "difference"]) element(id).hidden = !others.length;
  });
  listen(["obs", "axes", "tab", "subject", "other", "palette"], later(run, 60));
}
