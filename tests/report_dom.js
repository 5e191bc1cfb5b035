// Runs the script of a report in a document that has just enough of a browser's, and prints what it drew as JSON.
// node report_dom.js report.html [hash] ["buttons"]: with "buttons", all of them are pressed once.
"use strict";
const { readFileSync } = require("fs"), { runInNewContext } = require("vm");
const [file, hash, press] = process.argv.slice(2), html = readFileSync(file, "utf8");
const SVG = "svg-namespace", problems = [], all = [];

function check(what, value) {
  if (/NaN|undefined|Infinity|\[object/.test(String(value))) problems.push(what + ": " + String(value).slice(0, 80));
}
class Node {
  constructor(name, namespaceURI = "") {
    Object.assign(this, { name, namespaceURI, attributes: {}, children: [], listeners: {}, style: {}, dataset: {}, hidden: false });
    this.text = "";
    all.push(this);
  }
  setAttribute(key, value) { check(this.name + "." + key, value); this.attributes[key] = String(value); }
  set textContent(value) { check(this.name, value); this.text = String(value); }
  get textContent() { return this.text + this.children.map(child => child.textContent).join(""); }
  append(child) { if (typeof child === "string") { check(this.name, child); this.text += child; } else this.children.push(child); }
  replaceChildren() { this.children = []; this.text = ""; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  querySelector(selector) { return this.parts[selector]; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 100, height: 100 }; }
  set innerHTML(value) { this.children = [new Node("svg", SVG)]; }
  get firstChild() { return this.children[0]; }
  get offsetWidth() { return 10; }
  get offsetHeight() { return 10; }
}
const byId = {};
for (const [, id] of html.matchAll(/ id="([^"]*)"/g)) byId[id] = new Node("#" + id);
for (const id of ["chain-player", "episode-player", "film-player"]) {
  byId[id].parts = { button: new Node("button"), input: new Node("input"), output: new Node("output") };
}
const unescaped = text => text.replace(/&#34;|&quot;/g, '"').replace(/&#39;/g, "'").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const charts = [...html.matchAll(/data-hover="([^"]*)"/g)].map(([, text]) => {
  const chart = new Node("chart", SVG);
  Object.assign(chart, { dataset: { hover: unescaped(text) }, parts: { ".cursor": new Node("cursor", SVG) }, viewBox: { baseVal: { width: 100 } } });
  return chart;
});
const pickers = [...html.matchAll(/data-scene="(\d+)"/g)].map(([, scene]) => Object.assign(new Node("picker"), { dataset: { scene } }));
const document = {
  body: new Node("body"),
  getElementById: id => byId[id],
  createElement: name => new Node(name),
  createElementNS: (space, name) => new Node(name, space),
  querySelectorAll: selector => selector.startsWith("svg.chart") ? charts : pickers,
};
const window = {
  document, URLSearchParams, location: { hash: hash || "" }, performance: { now: () => 0 }, innerWidth: 800, innerHeight: 600,
  matchMedia: () => ({ matches: true }), addEventListener: () => {}, requestAnimationFrame: () => 0, JSON, Math, Object, String, Number, Set, Array,
};
runInNewContext(html.match(/<script>([\s\S]*)<\/script>/)[1], Object.assign(window, { window }));
for (const chart of charts) chart.listeners.pointermove({ clientX: 100, clientY: 0 });
const tip = byId.tip.textContent;
if (press) for (const node of [...pickers, ...byId.smalls.children]) node.listeners.click({});
const inside = node => [node, ...node.children.flatMap(inside)];
const player = id => ({ shown: byId[id].style.display !== "none", button: byId[id].parts.button.style.display !== "none", label: byId[id].parts.output.textContent });
console.log(JSON.stringify({
  problems, tip, ready: document.body.dataset.ready, charts: charts.length,
  panels: byId.panels.children.length,
  images: inside(byId.panels).filter(node => node.name === "image").length,
  dots: byId.panels.children.map(panel => inside(panel).filter(node => node.name === "circle").map(({ attributes: { cx, cy } }) => [Number(cx), Number(cy)])),
  notes: byId.panels.children.map(panel => panel.children[2].textContent),
  keys: byId["landscape-keys"].textContent,
  small: byId.smalls.children.length, stage: byId.stage.children.length, strip: byId["film-strip"].children.length,
  captions: [byId["landscape-caption"].textContent, byId["rollouts-caption"].textContent],
  chain: player("chain-player"), episode: player("episode-player"), film: player("film-player"),
}));
