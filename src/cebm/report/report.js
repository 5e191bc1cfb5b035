// The report's page: the studio's panels at some moments of a run, and the episodes of its task.
import { pointAt, readable } from "./curves.js";
import { paint } from "./draw.js";
import { number } from "./numbers.js";
import { described, drawLandscape, fillLegend, journey, picture } from "./plane.js";
import { Player } from "./player.js";
import { drawScene } from "./scene.js";

const byId = (id) => document.getElementById(id), scenes = JSON.parse(byId("data").textContent);

function add(parent, name, attributes = {}, words = "") {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = words;
  parent.append(node);
  return node;
}

// ---------------------------------------------------------------- players
const playerOf = (id, milliseconds) => {
  const [button, range, output] = byId(id).children;
  return new Player({ button, range, output }, milliseconds);
};
const chain = playerOf("chain-player", 480), episodes = playerOf("episode-player", 70), film = playerOf("film-player", 160);

// A player of one frame has nothing to play.
function load(player, id, last, draw, words) {
  player.load(last, draw, words);
  byId(id).hidden = last < 1; player.button.hidden = last < 2;
}

// ---------------------------------------------------------------- the energy landscape
function showLandscape({ landscape, why }) {
  const panels = byId("panels");
  panels.replaceChildren();
  byId("landscape-body").hidden = !landscape;
  byId("landscape-caption").textContent = landscape ? landscape.caption : why;
  if (!landscape) { chain.pause(); return; }
  const drawn = landscape.panels.map((panel) => {
    const figure = add(panels, "figure");
    add(figure, "h3", {}, panel.title);
    // Where the candidates fall through noise levels, each frame has a landscape of its own.
    const grounds = (panel.grounds || [panel.picture.energies]).map((energies, i) => picture({ ...panel.picture, energies }, { palette: "viridis", span: panel.grounds ? landscape.spans[i] : landscape.span, compact: true }));
    const canvas = add(figure, "canvas", { class: "square", role: "img", "aria-label": `${panel.title}. ${described(grounds[grounds.length - 1])}` });
    return { canvas, grounds, way: journey(panel.moves), note: add(figure, "p", { class: "note" }) };
  });
  // One legend for all panels: every kind of mark once.
  const marks = drawn.flatMap(({ grounds }) => grounds[0].marks);
  let scaled = -1;
  const legend = (frame) => {
    const ground = drawn[0].grounds[Math.min(frame, drawn[0].grounds.length - 1)];
    if (scaled === (landscape.levels ? frame : 0)) return;
    scaled = landscape.levels ? frame : 0;
    fillLegend(byId("landscape-keys"), { ...ground, marks }, { ...drawn[0].way, candidates: landscape.candidates });
  };
  load(chain, "chain-player", landscape.steps.length - 1, (at) => {
    const frame = Math.floor(at + 1e-6);
    legend(frame);
    for (const { canvas, grounds, way, note } of drawn) {
      const shown = grounds[Math.min(frame, grounds.length - 1)];
      paint(canvas, (brush) => drawLandscape(brush, shown, way, at));
      const chosen = `chosen (${shown.action.slice(0, 2).map((value) => number(value, 3)).join(", ")}${shown.action.length > 2 ? ", …" : ""})`;
      note.textContent = landscape.candidates > 1 ? `mean energy ${number(way.mean[frame], 3)}, ${chosen}` : chosen;
    }
  }, (frame) => {
    const words = landscape.steps[frame] ? `after step ${landscape.steps[frame]} of ${landscape.steps[landscape.steps.length - 1]}` : "start of the search";
    return landscape.levels ? `${words}, energy at noise level ${number(landscape.levels[frame], 2)}` : words;
  });
  chain.show(landscape.steps.length - 1);
}

// ---------------------------------------------------------------- roll-outs
const EDGE = 0.06;

function ground(data, episode, rest) {
  const discs = episode.goals.map((goal, i) => ({ name: String(i + 1), points: [goal], radius: data.radius, band: data.dim === 1 }));
  return { low: [-EDGE, -EDGE], high: [1 + EDGE, 1 + EDGE], walls: data.walls || [], discs, ...rest };
}

function small(data, episode, root) {
  const button = add(root, "button", { type: "button", class: "small" });
  const canvas = add(button, "canvas", { class: "square", role: "img", "aria-label": `Episode ${episode.index}: ${episode.remark}` });
  const end = episode.policy[episode.policy.length - 1];
  const scene = ground(data, episode, {
    edge: episode.success ? "" : "--vermillion",
    paths: [{ points: episode.expert, hue: "--grey", width: 1.3, dashed: true }, { points: episode.policy, hue: "--blue", width: 2 }],
    dots: [{ at: episode.policy[0], hue: "--blue", hollow: true, size: 3.6 }, { at: end, hue: episode.success ? "--blue" : "--vermillion", size: 4 }],
  });
  paint(canvas, (brush) => drawScene(brush, scene, 1));
  const words = add(button, "span", {}, `${episode.index}  `);
  add(words, "b", { class: episode.success ? "good" : "bad" }, `${episode.success ? "✓" : "✗"} ${episode.remark}`);
  return button;
}

function showEpisodes({ episodes: data, film: pictures, why }) {
  byId("smalls").replaceChildren(); byId("stage").replaceChildren();
  byId("rollouts-body").hidden = !data;
  byId("rollouts-caption").textContent = data ? data.caption : why;
  showFilm(pictures);
  if (!data) { episodes.pause(); return; }
  const buttons = data.episodes.map((episode) => small(data, episode, byId("smalls")));
  const choose = (index) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
    showStage(data, data.episodes[index]);
  };
  buttons.forEach((button, index) => button.addEventListener("click", () => { choose(index); episodes.play(); }));
  choose(data.shown);
  const words = ["blue: policy", "grey, dashed: expert", "open dot: start", "dot: end, red after a failure"];
  if (data.walls) words.push("black lines: obstacles");
  if (data.episodes[0].goals.length) words.push("orange: goal 1", "green: goal 2");
  byId("rollouts-keys").textContent = `${words.join("; ")}.`;
}

function showStage(data, episode) {
  const stage = byId("stage");
  stage.replaceChildren();
  const movers = [["Expert", "expert", "expert_aims", "--grey"], ["Policy", "policy", "aims", "--blue"]].map(([title, path, aims, hue]) => {
    const figure = add(stage, "figure"), name = add(figure, "h3", {}, `${title}, episode ${episode.index} `);
    if (path === "policy") add(name, "span", { class: episode.success ? "good" : "bad" }, `${episode.success ? "✓" : "✗"} ${episode.remark}`);
    const canvas = add(figure, "canvas", { class: "square", role: "img", "aria-label": `${title} in episode ${episode.index}` });
    return (at) => {
      const step = Math.min(Math.floor(at + 1e-6), data.steps), next = Math.min(step + 1, data.steps);
      const here = [0, 1].map((axis) => episode[path][step][axis] + (episode[path][next][axis] - episode[path][step][axis]) * (at - step));
      const target = episode[aims][Math.min(step, data.steps - 1)];
      const scene = ground(data, episode, {
        paths: [{ points: [...episode[path].slice(0, step + 1), here], hue, width: 2.4 }],
        aims: [{ from: here, to: data.dim === 1 ? [here[0], target[1]] : target }],
        dots: [{ at: here, hue, size: 6 }],
      });
      paint(canvas, (brush) => drawScene(brush, scene, 1));
    };
  });
  if (episode.chart) {
    const holder = add(stage, "div");
    holder.innerHTML = episode.chart; // drawn and escaped when the report was written
    readable(holder, byId("tip"));
    const chart = holder.querySelector("svg.chart");
    movers.push((at) => pointAt(chart, Math.floor(at + 1e-6)));
  }
  load(episodes, "episode-player", data.steps, (at) => movers.forEach((move) => move(at)), (step) => `control step ${step} of ${data.steps}`);
  episodes.show(data.steps);
}

function showFilm(pictures) {
  const strip = byId("film-strip"), frame = byId("film-frame");
  strip.replaceChildren(); frame.replaceChildren();
  byId("film").hidden = !pictures;
  if (!pictures) { film.pause(); return; }
  for (const index of pictures.strip) {
    const figure = add(strip, "figure"), image = add(figure, "img", { src: pictures.frames[index], alt: `Step ${pictures.at[index]}` });
    image.addEventListener("click", () => { film.pause(); film.show(index); });
    add(figure, "p", { class: "note" }, `step ${pictures.at[index]}`);
  }
  const shown = add(frame, "img", { alt: "The episode as its environment draws it" });
  load(film, "film-player", pictures.frames.length - 1, (at) => shown.setAttribute("src", pictures.frames[Math.floor(at + 1e-6)]), (index) => `step ${pictures.at[index]}`);
  film.show(0);
}

// ---------------------------------------------------------------- which setting, which moment
function show(index) {
  for (const button of document.querySelectorAll(".picker button")) button.setAttribute("aria-pressed", String(Number(button.dataset.scene) === index));
  showLandscape(scenes[index]);
  showEpisodes(scenes[index]);
}
for (const button of document.querySelectorAll(".picker button")) button.addEventListener("click", () => show(Number(button.dataset.scene)));
readable(document, byId("tip"));
show(0);
// #frame=5&time=20 opens the page at these frames; otherwise each animation plays once when it comes into view.
const wanted = new URLSearchParams(location.hash.slice(1));
if (wanted.has("frame") || wanted.has("time")) {
  if (wanted.has("frame") && scenes[0].landscape) chain.show(Number(wanted.get("frame")));
  if (wanted.has("time") && scenes[0].episodes) episodes.show(Number(wanted.get("time")));
} else if (!matchMedia("(prefers-reduced-motion: reduce)").matches && "IntersectionObserver" in window) {
  for (const [id, player] of [["panels", chain], ["stage", episodes]]) {
    const watch = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); if (player.last > 1) player.play(); }
    }, { threshold: 0.6 });
    watch.observe(byId(id));
  }
}
addEventListener("beforeprint", () => { for (const player of [chain, episodes, film]) { player.pause(); player.show(player.last); } });
document.body.dataset.ready = "true";
