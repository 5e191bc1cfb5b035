// A pen with the methods of a canvas that the panels use, which writes SVG.
const NUMBER = (value) => String(Math.round(value * 100) / 100);
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => String(text).replace(/[&<>"]/g, (letter) => ESCAPES[letter]);
const ANCHOR = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
const BASE = { top: "0.8em", middle: "0.35em", bottom: "-0.2em", alphabetic: "0" };
const KEPT = ["fillStyle", "strokeStyle", "lineWidth", "font", "textAlign", "textBaseline", "globalAlpha", "dash", "move"];
// The name of SVG's namespace, from the browser, which has it: a page that needs no network holds no address.
const space = () => Object.assign(document.createElement("div"), { innerHTML: "<svg></svg>" }).firstChild.namespaceURI;

export class SvgPen {
  constructor(width, height) {
    Object.assign(this, { width, height, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "11px sans-serif", textAlign: "start", textBaseline: "alphabetic", globalAlpha: 1, dash: "", move: "" });
    this.parts = []; this.path = ""; this.kept = []; this.clips = 0;
  }
  text() {
    return `<svg xmlns="${space()}" width="${NUMBER(this.width)}" height="${NUMBER(this.height)}" viewBox="0 0 ${NUMBER(this.width)} ${NUMBER(this.height)}">${this.parts.join("")}</svg>`;
  }
  save() { this.kept.push([KEPT.map((name) => this[name]), 0]); }
  restore() {
    const [values, groups] = this.kept.pop();
    KEPT.forEach((name, i) => { this[name] = values[i]; });
    this.parts.push("</g>".repeat(groups));
  }
  // A clip holds until the next restore.
  clip() {
    const id = `clip-${(this.clips += 1)}`;
    this.parts.push(`<clipPath id="${id}"><path d="${this.path}"/></clipPath><g clip-path="url(#${id})">`);
    if (this.kept.length) this.kept[this.kept.length - 1][1] += 1;
  }
  translate(x, y) { this.move += `translate(${NUMBER(x)} ${NUMBER(y)}) `; }
  rotate(angle) { this.move += `rotate(${NUMBER((angle * 180) / Math.PI)}) `; }
  setLineDash(lengths) { this.dash = lengths.join(" "); }
  beginPath() { this.path = ""; }
  closePath() { this.path += "Z"; }
  moveTo(x, y) { this.to("M", x, y); }
  lineTo(x, y) { this.to(this.path ? "L" : "M", x, y); }
  to(letter, x, y) { if (Number.isFinite(x + y)) this.path += `${letter}${NUMBER(x)} ${NUMBER(y)}`; }
  rect(x, y, width, height) { this.path += `M${NUMBER(x)} ${NUMBER(y)}h${NUMBER(width)}v${NUMBER(height)}h${NUMBER(-width)}Z`; }
  // Whole circles only: the panels draw no others.
  arc(x, y, radius) { if (Number.isFinite(x + y)) this.path += `M${NUMBER(x - radius)} ${NUMBER(y)}a${NUMBER(radius)} ${NUMBER(radius)} 0 1 0 ${NUMBER(2 * radius)} 0a${NUMBER(radius)} ${NUMBER(radius)} 0 1 0 ${NUMBER(-2 * radius)} 0Z`; }
  fill() { this.add("path", { d: this.path, fill: this.fillStyle }); }
  stroke() { this.add("path", { d: this.path, ...this.line() }); }
  fillRect(x, y, width, height) { this.add("rect", { x, y, width, height, fill: this.fillStyle }); }
  strokeRect(x, y, width, height) { this.add("rect", { x, y, width, height, ...this.line() }); }
  fillText(text, x, y) { this.letters(text, x, y, { fill: this.fillStyle }); }
  strokeText(text, x, y) { this.letters(text, x, y, this.line()); }
  drawImage(canvas, x, y, width, height) { this.add("image", { href: canvas.toDataURL(), x, y, width, height, preserveAspectRatio: "none" }); }
  line() { return { fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-linejoin": "round", ...(this.dash && { "stroke-dasharray": this.dash }) }; }
  letters(text, x, y, style) {
    const [, weight = "", size, family] = this.font.match(/^(\w+ )?(\d+)px (.*)$/);
    this.add("text", { x, y, dy: BASE[this.textBaseline], "text-anchor": ANCHOR[this.textAlign], "font-size": size, "font-family": family, ...(weight && { "font-weight": weight.trim() }), ...style }, escaped(text));
  }
  add(name, attributes, inside = "") {
    if (attributes.d === "") return;
    if (this.move) attributes.transform = this.move.trim();
    if (this.globalAlpha !== 1) attributes.opacity = this.globalAlpha;
    const written = Object.entries(attributes).map(([key, value]) => ` ${key}="${typeof value === "number" ? NUMBER(value) : escaped(value)}"`).join("");
    this.parts.push(`<${name}${written}>${inside}</${name}>`);
  }
}
