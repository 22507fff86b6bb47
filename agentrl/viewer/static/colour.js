// Colour scales that readers with colour blindness can tell apart: cividis in sequence, blue to orange on both sides of a middle.
const CIVIDIS = ["#00224e", "#083370", "#35456c", "#4f576c", "#666970", "#7d7c78", "#948e77", "#aea371", "#c8b866", "#e5cf52", "#fee838"];
const BLUES = ["#d8e6f4", "#a9cbe8", "#6fa8d6", "#3b82c0", "#14589a"];
const ORANGES = ["#fbe3cc", "#f8c08d", "#f0964a", "#d96d14", "#9c4a06"];
export const CATEGORIES = ["#3b78b5", "#d9731a", "#7a9a01", "#8a5fbf", "#b5a021", "#4fa3a5", "#c25b7c", "#777777"];

const channels = (colour) => [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));

function between(stops, place) {
  const at = Math.min(1, Math.max(0, place)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  const [first, second] = [channels(stops[low]), channels(stops[low + 1])];
  return first.map((value, index) => Math.round(value + (second[index] - value) * (at - low)));
}

const linear = (channel) => (channel / 255 <= 0.04045 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4);
const PANELS = { true: [27, 31, 35], false: [255, 255, 255] }; // behind a colour, dark or not

// A colour over the page, with black or white text, whichever is read better on it; a faint one leaves the text as it is.
function painted(colour, alpha, dark = false) {
  const [red, green, blue] = colour;
  const style = { backgroundColor: `rgba(${red}, ${green}, ${blue}, ${alpha})` };
  const [r, g, b] = colour.map((channel, index) => linear(alpha * channel + (1 - alpha) * PANELS[dark][index]));
  if (alpha > 0.3) style.color = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff"; // both pass 4.5 to 1 at 0.18; a grey as dark as #111 would not
  return style;
}

// `place` runs from 0, which is quiet, to 1, which stands out on a light and on a dark page.
export function sequential(place, dark) {
  if (!(place > 0.02)) return {};
  const shown = Math.min(1, place);
  return painted(between(CIVIDIS, dark ? 0.15 + 0.85 * shown : 1 - shown), Math.min(1, 0.15 + 1.8 * shown), dark);
}

// `place` runs from -1 (blue) over 0 (no colour) to 1 (orange).
export function diverging(place) {
  const size = Math.min(1, Math.abs(place));
  if (!(size > 0.02)) return {};
  return painted(between(place < 0 ? BLUES : ORANGES, size), 1);
}

export const category = (index) => ({ backgroundColor: `rgba(${channels(CATEGORIES[index % CATEGORIES.length]).join(", ")}, 0.45)` });
export const lineColour = (index) => CATEGORIES[index % CATEGORIES.length];

// Whole scale, for legends: [place, style] pairs.
export function samples(kind, dark, count = 11) {
  const places = Array.from({ length: count }, (_, index) => index / (count - 1));
  return kind === "diverging" ? places.map((place) => diverging(2 * place - 1)) : places.map((place) => sequential(place, dark));
}
