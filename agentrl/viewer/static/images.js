// Images of an episode: those of its task, those that its environment showed to a turn, and the parts that tokens stand for.
import { html } from "./html.js";
import { question, runPath, saved, savedImage } from "./api.js";

// Address of an image; "" if a saved page lacks it.
export function sourceOf(run, episode, index) {
  const where = runPath(run, "image", episode.episode, index);
  return saved ? savedImage(where) : question(where, { attempt: episode.attempt || "" });
}

export function Images({ run, episode, numbers, what }) {
  if (!numbers.length) return null;
  return html`<div class="images">${numbers.map((index) => {
    const source = sourceOf(run, episode, index);
    const missing = (event) => (event.target.replaceWith(Object.assign(document.createElement("span"), { className: "empty", textContent: `image ${index + 1} is not there, or is no PNG, JPEG, GIF or WebP` })));
    return source ? html`<img key=${index} src=${source} alt=${`image ${index + 1}, ${what}`} title=${what} onError=${missing} />` : html`<span key=${index} class="empty">image ${index + 1} is not in this file</span>`;
  })}</div>`;
}

// Images that a turn shows: all of its prompt where these are known, else those of its observation.
export const imagesOf = (turn) => ((turn.pictures || []).length ? turn.pictures.map((picture) => picture.image) : turn.images || []);

// Images of the task that no turn shows.
export function imagesOfTask(episode) {
  const shown = new Set(episode.turns.flatMap(imagesOf));
  return Array.from({ length: episode.task.images || 0 }, (_, index) => index).filter((index) => !shown.has(index));
}

// Where a background must lie so that a box shows only its part, which begins at a share of the side and is so wide.
const shifted = (begin, width) => `${width < 1 ? (100 * begin) / (1 - width) : 0}%`;

// The part of a picture that a token of a prompt stands for, by the place of the token: a title and a style.
export function patchesOf(turn, source) {
  const found = new Map();
  for (const { image, blocks } of turn.pictures || []) {
    const address = source(image).replaceAll('"', "%22");
    for (const [begin, rows, columns, left, top, right, bottom] of blocks) {
      const [width, height] = [(right - left) / columns, (bottom - top) / rows];
      for (let cell = 0; cell < rows * columns; cell += 1) {
        const [row, column] = [Math.floor(cell / columns), cell % columns];
        const position = `${shifted(left + column * width, width)} ${shifted(top + row * height, height)}`;
        const style = { backgroundImage: `url("${address}")`, backgroundSize: `${100 / width}% ${100 / height}%`, backgroundPosition: position };
        found.set(begin + cell, { title: `row ${row + 1}, column ${column + 1} of ${rows} x ${columns} of image ${image + 1}`, style: address ? style : {} });
      }
    }
  }
  return found;
}
