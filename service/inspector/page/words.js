// Numbers as people read them, and elements made of text alone: nothing that a caller wrote is ever parsed as HTML.

export function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

export const count = (number) => Number(number).toLocaleString("en");

export function size(bytes) {
  let number = Number(bytes);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1024) return `${number.toLocaleString("en", { maximumFractionDigits: unit === "B" ? 0 : 1 })} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} TiB`;
}

// "3.2s" of the contract, or a number of seconds.
export const seconds = (duration) => (typeof duration === "string" ? parseFloat(duration) : duration);

export function span(duration) {
  const s = seconds(duration);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

export const short = (name) => name.replace(/^(snapshots|models|generations)\//, "");
