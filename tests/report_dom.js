// Runs the script of a report in a document that has just enough of a browser's, and prints what it drew as JSON.
// node report_dom.js report.html [hash] ["buttons"]: with "buttons", all of them are pressed once.
"use strict";
const { readFileSync } = require("fs"), { runInNewContext } = require("vm");
const [file, hash, press] = process.argv.slice(2), html = readFileSync(file, "utf8");
const problems = [];

function check(what, value) {
  if (/NaN|undefined|Infinity|\[object/.test(String(value))) problems.push(what + ": " + String(value).slice(0, 80));
}
// A pen that keeps circles and pictures, and minds every number.
function penOf(node) {
  const keep = (kind, ...numbers) => { numbers.forEach(value => check("pen." + kind, value)); node.drawn.push([kind, ...numbers]); };
  const known = {
    arc: (x, y, radius) => keep("arc", x, y, radius), drawImage: (image, ...numbers) => keep("image", ...numbers),
    fillText: (words, x, y) => { check("pen.fillText", words); keep("text", x, y); },
    measureText: (words) => ({ width: 6 * words.length }),
    createImageData: (width, height) => ({ data: new Uint8ClampedArray(4 * width * height) }), putImageData: () => {},
    fillRect: (...numbers) => keep("rect", ...numbers), moveTo: (...numbers) => keep("move", ...numbers), lineTo: (...numbers) => keep("line", ...numbers),
  };
  return new Proxy(known, { get: (all, name) => all[name] || (() => {}), set: (all, name, value) => { check("pen." + String(name), value); return true; } });
}
class Node {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], listeners: {}, style: {}, dataset: {}, classList: { toggle: () => {} }, hidden: false, drawn: [], isConnected: true });
    this.text = ""; this.parts = {};
  }
  setAttribute(key, value) { check(this.name + "." + key, value); this.attributes[key] = String(value); }
  set textContent(value) { check(this.name, value); this.text = String(value); }
  get textContent() { return this.text + this.children.map(child => child.textContent).join(""); }
  append(...children) { for (const child of children) { if (typeof child === "string") { check(this.name, child); this.text += child; } else this.children.push(child); } }
  replaceChildren(...children) { this.children = children; this.text = ""; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  querySelector(selector) { return selector === "svg.chart" ? this.charts[0] : this.parts[selector]; }
  querySelectorAll() { return this.charts || []; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 1000, height: 1000 }; }
  getContext() { this.drawn = []; return penOf(this); }
  set innerHTML(value) { check(this.name, value); this.charts = chartsOf(value, false); this.inside = value; }
  get offsetWidth() { return 10; }
  get offsetHeight() { return 10; }
}
const unescaped = text => text.replace(/&#34;|&quot;/g, '"').replace(/&#39;/g, "'").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const chartsOf = text => [...text.matchAll(/data-hover="([^"]*)"/g)].map(([, hover]) => {
  const chart = new Node("chart");
  Object.assign(chart, { dataset: { hover: unescaped(hover) }, parts: { ".cursor": new Node("cursor") }, viewBox: { baseVal: { width: 100 } } });
  return chart;
});
const byId = {}, page = html.split('<script type="application/json"')[0];
for (const [, id] of html.matchAll(/ id="([^"]*)"/g)) byId[id] = new Node("#" + id);
for (const id of ["chain-player", "episode-player", "film-player"]) byId[id].children = ["button", "input", "output"].map(name => new Node(name));
byId.data.text = html.match(/id="data">([\s\S]*?)<\/script>/)[1];
const charts = chartsOf(page);
const pickers = [...html.matchAll(/data-scene="(\d+)"/g)].map(([, scene]) => Object.assign(new Node("picker"), { dataset: { scene } }));
const document = {
  body: new Node("body"), documentElement: new Node("html"),
  getElementById: id => byId[id], createElement: name => new Node(name),
  querySelectorAll: selector => selector.startsWith("svg.chart") ? charts : pickers,
};
const window = {
  document, URLSearchParams, location: { hash: hash || "" }, performance: { now: () => 0 }, innerWidth: 800, innerHeight: 600, atob, Uint8Array, Float32Array,
  matchMedia: () => ({ matches: true, addEventListener: () => {} }), addEventListener: () => {}, requestAnimationFrame: () => 0, devicePixelRatio: 1,
  getComputedStyle: () => ({ getPropertyValue: () => "#123456" }), ResizeObserver: class { observe() {} unobserve() {} },
};
runInNewContext(html.match(/<script>([\s\S]*)<\/script>/)[1], Object.assign(window, { window }));
for (const chart of charts) chart.listeners.pointermove({ clientX: 100, clientY: 0 });
const tip = byId.tip.textContent;
if (press) for (const node of [...pickers, ...byId.smalls.children]) node.listeners.click({});
const inside = node => [node, ...node.children.flatMap(inside)];
const canvases = id => inside(byId[id]).filter(node => node.name === "canvas");
const player = id => ({ shown: !byId[id].hidden, button: !byId[id].children[0].hidden, label: byId[id].children[2].textContent });
console.log(JSON.stringify({
  problems, tip, ready: document.body.dataset.ready, charts: charts.length,
  panels: byId.panels.children.length,
  images: canvases("panels").flatMap(canvas => canvas.drawn).filter(([kind]) => kind === "image").length,
  circles: canvases("panels").map(canvas => canvas.drawn.filter(([kind]) => kind === "arc").map(([, ...numbers]) => numbers)),
  notes: byId.panels.children.map(panel => panel.children[2].textContent),
  keys: byId["landscape-keys"].textContent, hues: byId["rollouts-keys"].textContent,
  small: byId.smalls.children.length, stage: byId.stage.children.length, strip: byId["film-strip"].children.length,
  captions: [byId["landscape-caption"].textContent, byId["rollouts-caption"].textContent],
  chain: player("chain-player"), episode: player("episode-player"), film: player("film-player"),
}));
