// All figures of the token under the pointer, or of the chosen one.
import { html } from "./html.js";
import { known, number, percent } from "./format.js";
import { FIGURES, at, isTrained, piecesOf } from "./tokens.js";

export function TokenFigures({ episode, place }) {
  const turn = place && episode.turns[place.turn];
  if (!turn || place.token >= (turn.tokens.ids || []).length) {
    return html`<p class="dim">Point at a token to see its figures; a click keeps it and puts it into the address. The arrow keys go from token to token.</p>`;
  }
  const index = place.token;
  const mask = at(turn.tokens.mask, index);
  const logprob = at(turn.tokens.logprob, index);
  const shown = Object.entries(FIGURES).map(([name, { text }]) => [name, text, at(turn.tokens[name], index)]);
  return html`<p class="mono token-name"><b>${JSON.stringify(piecesOf(turn.tokens)[index])}</b></p><p class="dim">${episode.row === undefined ? `turn ${place.turn + 1}, ` : ""}token ${index + 1} of ${turn.tokens.ids.length}, number ${turn.tokens.ids[index]}</p>
    <table class="figures" id="figures"><tbody>${known(logprob) && html`<tr><td class="dim">probability, engine</td><td>${percent(Math.exp(logprob))}</td></tr>`}
    ${shown.map(([name, text, value]) => known(value) && html`<tr key=${name} data-figure=${name}><td class="dim">${text}</td><td>${number(value, 5)}</td></tr>`)}
    <tr data-figure="mask"><td class="dim">trained</td><td>${isTrained(mask)}</td></tr></tbody></table>
    ${mask && mask !== "trained" && html`<p class="note">${(episode.masks || {})[mask] || mask.replaceAll("_", " ")}</p>`}`;
}
