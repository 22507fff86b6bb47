// The one place that names the vendored libraries. Text goes into the page as text nodes only: no module sets markup.
import { h, render, Fragment } from "./vendor/preact.js";
import { useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export const uPlot = globalThis.uPlot;
export { Fragment, render, useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState };
