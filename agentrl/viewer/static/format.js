// Numbers, durations, moments and counts as text.
export const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return value === null || value === undefined ? "–" : String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(digits)));
}

export const signed = (value, digits = 3) => (known(value) && value > 0 ? "+" : "") + number(value, digits);
export const percent = (value) => (known(value) ? `${Number((100 * value).toPrecision(3))}%` : "–");

export function large(value) {
  if (!known(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return number(value, 3);
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1) return `${Number((value * 1000).toPrecision(2))} ms`;
  if (value < 90) return `${Number(value.toPrecision(3))} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Number((value / 3600).toPrecision(3))} h` : `${Number((value / 86400).toPrecision(3))} d`;
}

export function moment(stamp) {
  if (!known(stamp)) return "–";
  const date = new Date(stamp * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
export const brief = (text, length = 80) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// A token with its white space made visible.
export const spelled = (piece) => piece.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "→") || "∅";

export function valueText(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}
