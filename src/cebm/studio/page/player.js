// A button, a scrubber and a label that play something through; positions between two frames are shown too.
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Player {
  constructor({ button, range, output }, milliseconds) {
    Object.assign(this, { button, range, output, milliseconds, last: 0, at: 0, draw: () => {}, words: () => "", playing: false });
    button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    range.addEventListener("input", () => { this.pause(); this.show(Number(range.value)); });
    this.pause();
  }
  // `last`: the number of the last frame; `draw` gets a position, `words` a frame.
  load(last, draw, words) {
    this.pause();
    Object.assign(this, { last, draw, words });
    this.range.max = last; this.range.disabled = last < 1; this.button.disabled = last < 2;
  }
  get frame() { return Math.floor(this.at + 1e-6); }
  show(at) {
    this.at = Math.max(0, Math.min(this.last, at));
    this.range.value = this.frame; this.output.textContent = this.words(this.frame);
    this.range.setAttribute("aria-valuetext", this.words(this.frame));
    this.draw(this.at);
  }
  pause() { this.playing = false; this.button.textContent = "▶ Play"; this.button.setAttribute("aria-pressed", "false"); }
  play() {
    if (this.at >= this.last) this.show(0);
    this.playing = true; this.button.textContent = "❚❚ Pause"; this.button.setAttribute("aria-pressed", "true");
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      // Who wants no motion sees frames and nothing between them.
      const at = this.at + Math.max(0, now - before) / this.milliseconds;
      if (!still || Math.floor(at) > this.frame) { this.show(still ? Math.floor(at) : at); before = now; }
      if (this.at >= this.last) this.pause(); else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }
}
