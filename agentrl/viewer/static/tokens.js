// Colours of tokens: what each figure means, its scale, its legend.
import { html } from "./html.js";
import { category, diverging, sequential } from "./colour.js";
import { known, number } from "./format.js";
import { KeyLegend, ScaleLegend } from "./legend.js";

const IMPROBABLE = 6; // nats: a probability of 0.25%

// A figure of one token; an answer holds one value for all tokens of a turn if they are equal.
export function at(values, index) {
  const value = Array.isArray(values) ? values[index] : values;
  return value === undefined ? null : value;
}

// Sentence, kind of scale, and what is shown of it, for each figure by which tokens can be coloured.
export const FIGURES = {
  logprob: { text: "log-probability, engine", scale: "low" },
  learner: { text: "log-probability, learner", scale: "low" },
  difference: { text: "difference learner − engine", scale: "both", least: 0.01 },
  ratio: { text: "ratio of the loss", scale: "ratio", least: 0.05 },
  weight: { text: "off-policy weight", scale: "ratio", least: 0.05 },
  advantage: { text: "advantage", scale: "both", least: 0.1 },
  entropy: { text: "entropy", scale: "high", least: 0.5 },
  loss: { text: "share of the loss", scale: "both", least: 1e-6 },
  reference: { text: "log-probability, reference", scale: "low" },
  value: { text: "value of the critic", scale: "both", least: 0.1 },
  return: { text: "return", scale: "both", least: 0.1 },
  loss_before: { text: "loss before training", scale: "high", least: 0.1 },
  loss_after: { text: "loss after training", scale: "high", least: 0.1 },
  loss_change: { text: "change of the loss", scale: "both", least: 0.1 },
  logprob_before: { text: "log-probability before training", scale: "low" },
  logprob_after: { text: "log-probability after training", scale: "low" },
  logprob_change: { text: "change of the log-probability", scale: "both", least: 0.1 },
  label: { text: "label of the step", scale: "high", least: 1 },
  version: { text: "version of the weights", scale: "version" },
  staleness: { text: "staleness, steps", scale: "high", least: 1 },
};

const far = (range, least) => Math.max(least, Math.abs((range || [0, 0])[0]), Math.abs((range || [0, 0])[1]));
const logFar = (range, least) => Math.min(3, Math.max(least, ...(range || [1, 1]).map((value) => (value > 0 ? Math.abs(Math.log(value)) : 3))));

export function coloursOf(episode) {
  return [...Object.keys(FIGURES).filter((name) => (episode.fields || []).includes(name)), "mask"];
}

// Whether a token is trained: "yes", "no", or "not recorded" by runs without figures of the learner.
export const isTrained = (mask) => (mask === "trained" ? "yes" : mask === "unknown" || !mask ? "not recorded" : "no");

const maskCodes = (episode) => Object.keys(episode.masks || {}).filter((code) => isTrained(code) === "no" && code !== "not_action");

function versionsOf(episode) {
  const [low, high] = (episode.ranges || {}).version || [0, 0];
  return { low, high, few: high - low < 8 };
}

// The style of a token under a figure, as a function (tokens of the turn, index) -> style.
export function painter(episode, name, dark) {
  const { scale, least } = FIGURES[name] || {};
  const range = (episode.ranges || {})[name];
  if (name === "mask") {
    const codes = maskCodes(episode);
    return (tokens, index) => (codes.includes(at(tokens.mask, index)) ? category(codes.indexOf(at(tokens.mask, index)) + 1) : {});
  }
  if (scale === "version") {
    const { low, high, few } = versionsOf(episode);
    return (tokens, index) => (few ? category(at(tokens.version, index) - low) : sequential((at(tokens.version, index) - low) / (high - low), dark));
  }
  const places = {
    low: (value) => sequential(-value / IMPROBABLE, dark),
    high: (value) => sequential(value / Math.max(least, (range || [0, 0])[1]), dark),
    both: (value) => diverging(value / far(range, least)),
    ratio: (value) => diverging(value > 0 ? Math.log(value) / logFar(range, least) : -1),
  };
  return (tokens, index) => {
    const value = at(tokens[name], index);
    return places[scale] && known(value) ? places[scale](value) : {};
  };
}

export function TokenLegend({ episode, name }) {
  const { text, scale, least } = FIGURES[name] || {};
  const range = (episode.ranges || {})[name];
  if (name === "mask") {
    const entries = maskCodes(episode).map((code, index) => [code.replaceAll("_", " "), category(index + 1)]);
    const none = "unknown" in (episode.masks || {}) ? "this run does not say what was trained" : "every token is trained";
    return html`<${KeyLegend} label="not trained, because of" entries=${entries.length ? entries : [[none, {}]]} />`;
  }
  if (scale === "version") {
    const { low, high, few } = versionsOf(episode);
    if (!few) return html`<${ScaleLegend} kind="sequential" label=${text} low=${low} high=${high} />`;
    return html`<${KeyLegend} label=${text} entries=${Array.from({ length: high - low + 1 }, (_, index) => [low + index, category(index)])} />`;
  }
  if (scale === "low") return html`<${ScaleLegend} kind="sequential" label=${text} low="0 (certain)" high=${`−${IMPROBABLE} or less (0.25%)`} />`;
  if (scale === "high") return html`<${ScaleLegend} kind="sequential" label=${text} low="0" high=${number(Math.max(least, (range || [0, 0])[1]), 3)} />`;
  if (scale === "both") return html`<${ScaleLegend} kind="diverging" label=${text} low=${`−${number(far(range, least), 3)}`} middle="0" high=${number(far(range, least), 3)} />`;
  if (scale === "ratio") return html`<${ScaleLegend} kind="diverging" label=${text} low=${number(Math.exp(-logFar(range, least)), 3)} middle="1" high=${number(Math.exp(logFar(range, least)), 3)} />`;
  return null;
}

// Texts of tokens; without a tokenizer their numbers.
export const piecesOf = (part) => part.pieces || (part.ids || []).map((id) => `[${id}]`);

// The places of tokens in which a text is found, across the borders of tokens.
export function foundTokens(pieces, text) {
  const found = new Set();
  if (!text) return found;
  const whole = pieces.join("").toLowerCase();
  const starts = [];
  let length = 0;
  for (const piece of pieces) {
    starts.push(length);
    length += piece.length;
  }
  for (let place = whole.indexOf(text.toLowerCase()); place >= 0; place = whole.indexOf(text.toLowerCase(), place + 1)) {
    starts.forEach((start, index) => start < place + text.length && start + pieces[index].length > place && found.add(index));
  }
  return found;
}
