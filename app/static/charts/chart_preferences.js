// How a user has arranged charts, which the server keeps; behind a read-only link it holds for the page only.
import { readSizes } from 'panel_layout'
import { root } from 'root'

/**
 * @typedef {{
 *   pinned: string[],
 *   collapsed: string[],
 *   order: string[],
 *   sizes: Record<string, import('panel_layout').Size>,
 *   ranges: Record<string, import('url_state').Range>,
 *   logs: string[],
 *   trimmed: string[]
 * }} Arrangement
 */

const MOST = 200
/** Time to wait for more changes. */
const WAIT_MS = 400

/** Changes that are not sent yet, by path. @type {Map<string, any>} */
const unsent = new Map()
let waiting = 0
const send = () => {
  clearTimeout(waiting)
  for (const [path, content] of unsent) {
    fetch(`${root}/api/v1/preferences/${path}`, {
      method: 'PUT',
      keepalive: true,
      headers: {
        'X-CSRF-Token': document.querySelector('meta[name=csrf-token]').content,
        'Content-Type': 'application/json',
      },
      body: JSON.stringify(content),
    }).catch(() => {
      /* it holds for this page */
    })
  }
  unsent.clear()
}
/** @param {string} path @param {any} content */
const keep = (path, content) => {
  unsent.set(path, content)
  clearTimeout(waiting)
  waiting = setTimeout(send, WAIT_MS)
}
addEventListener('pagehide', send)

/** @param {string|undefined} text @returns {any} */
const parsed = (text) => {
  try {
    return JSON.parse(text ?? 'null')
  } catch {
    return null
  }
}
/** Return the arrangement that this browser stored before the server did. @param {string} recipe */
const keptBefore = (recipe) => {
  try {
    return parsed(localStorage.getItem(`halfstep.metrics.${recipe}`) ?? undefined)
  } catch {
    return null
  }
}
/** @param {any} list */
const texts = (list) => (Array.isArray(list) ? list.filter((each) => typeof each === 'string').slice(0, MOST) : [])
/** @param {any} ranges */
const rangesOf = (ranges) =>
  Object.fromEntries(
    Object.entries(ranges ?? {})
      .filter(([, range]) => Array.isArray(range) && range.length === 2 && range.every(Number.isFinite))
      .slice(0, MOST),
  )

/**
 * Key for the arrangement of panels of several runs, instead of a recipe. A fixed range is of these runs only, and not
 * kept.
 */
export const SEVERAL_RUNS = 'several runs'

/**
 * The arrangement of a recipe's panels.
 * @param {HTMLElement} section whose data-arrangement the server wrote
 * @param {string} recipe
 * @returns {{arrangement: Arrangement, keep: () => void}}
 */
export const arrangementOf = (section, recipe) => {
  const own = section.dataset.arrangement
  const kept = parsed(own) ?? (own === undefined ? null : keptBefore(recipe))
  const arrangement = {
    pinned: texts(kept?.pinned),
    collapsed: texts(kept?.collapsed),
    order: texts(kept?.order),
    logs: texts(kept?.logs),
    trimmed: texts(kept?.trimmed),
    sizes: readSizes(kept?.sizes),
    ranges: rangesOf(kept?.ranges),
  }
  return {
    arrangement,
    keep: () => {
      if (own !== undefined) keep('panels', { recipe, ...arrangement, ...(recipe === SEVERAL_RUNS && { ranges: {} }) })
    },
  }
}

/**
 * Apply the last choice of the toolbar, unless the URL has one.
 * @param {HTMLElement} section whose data-toolbar the server wrote
 * @param {import('url_state').View} view
 */
export const recallToolbar = (section, view) => {
  const kept = parsed(section.dataset.toolbar)
  const query = new URLSearchParams(location.search)
  if (!kept || ['x', 'loss', 'smooth'].some((name) => query.has(name))) return
  // A script may have defined an axis to begin with.
  if (kept.x !== 'step' && section.querySelector(`[data-view=x][value="${CSS.escape(kept.x)}"]`)) view.x = kept.x
  if (kept.smooth >= 0 && kept.smooth <= 0.99) view.smooth = kept.smooth
}
/**
 * loss: of an earlier version, the axis in panels that were not arranged since.
 * @param {HTMLElement} section
 * @param {import('url_state').View} view
 */
export const keepToolbar = (section, { x, smooth }) => {
  if (section.dataset.toolbar !== undefined)
    keep('toolbar', { x, smooth, loss: parsed(section.dataset.toolbar)?.loss ?? 'linear' })
}
