// Numbers as the server packs them, and as people read them.
export function unpack(array) {
  const bytes = Uint8Array.from(atob(array.f32), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return String(Number(value.toPrecision(digits)));
}
