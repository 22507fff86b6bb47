// Histogram whose bars are buttons: the chosen bar is a filter.
import { html } from "./html.js";
import { known, number } from "./format.js";

// Bins of values: one for each value while there are few different ones, else `most` of equal width. The bin's ends are inclusive.
export function binsOf(values, most = 16) {
  const shown = values.filter(known);
  const different = [...new Set(shown.map((value) => Number(value.toPrecision(6))))].sort((one, other) => one - other);
  if (different.length <= most) {
    return different.map((value) => ({ low: value, high: value, label: number(value, 3), count: shown.filter((other) => Number(other.toPrecision(6)) === value).length }));
  }
  const [low, width] = [different[0], (different.at(-1) - different[0]) / most];
  const bins = Array.from({ length: most }, (_, index) => ({ low: low + index * width, high: low + (index + 1) * width, label: number(low + index * width, 2), count: 0 }));
  for (const value of shown) bins[Math.min(most - 1, Math.floor((value - low) / width))].count += 1;
  return bins;
}

export const inBin = (value, bin) => known(value) && (bin.low === bin.high ? Number(value.toPrecision(6)) === bin.low : value >= bin.low && value <= bin.high);

export function Histogram({ bins, chosen, choose, label }) {
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  return html`<div role="group" aria-label=${label}><div class="histogram">${bins.map(
    (bin, index) => html`<button type="button" key=${index} class=${chosen === index ? "on" : ""} title=${`${bin.count} with ${bin.low === bin.high ? number(bin.low) : `${number(bin.low)} to ${number(bin.high)}`}`}
      aria-pressed=${chosen === index} onClick=${() => choose(chosen === index ? null : index)}>${bin.count || ""}<i style=${{ height: `${(80 * bin.count) / most}%` }}></i></button>`,
  )}</div><div class="bins">${bins.map((bin, index) => html`<span key=${index}>${bin.label}</span>`)}</div></div>`;
}
