// Replace HTML without disturbing the user: rows that did not
// change stay, ticked boxes stay ticked, opened details stay open.
import { localTimes } from 'formats'
import { still } from 'dom_updates'

/** The HTML that each element was made from. @type {WeakMap<Element, string>} */
const sources = new WeakMap()

/** @param {string} html @returns {DocumentFragment} */
const parsed = (html) => {
  const template = document.createElement('template')
  template.innerHTML = html
  return template.content
}

/** Timers of rows with a cell that waits until it is no longer in use. @type {WeakMap<Element, number>} */
const waiting = new WeakMap()
const WAIT_MS = 500

/** Keep what the user has opened or ticked. @param {Element} old @param {ParentNode} fresh */
const keepState = (old, fresh) => {
  const opened = [...old.querySelectorAll('details')].map(({ open }) => open)
  fresh.querySelectorAll('details').forEach((details, i) => {
    details.open = opened[i] ?? details.open
  })
  const box = fresh.querySelector('input[type=checkbox]')
  if (box) box.checked = old.querySelector('input[type=checkbox]')?.checked ?? false
}

/**
 * Make a node like another, by the texts and attributes that differ: a new node costs more layout.
 * @param {any} node
 * @param {any} fresh
 */
const change = (node, fresh) => {
  const isAlike = node.nodeName === fresh.nodeName && node.childNodes.length === fresh.childNodes.length
  if (!isAlike) return node.replaceWith(fresh.cloneNode(true))
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.data === fresh.data) return
    // Of a text that is aligned right another length would count as a shift.
    if (node.data.length === fresh.data.length) node.data = fresh.data
    else node.replaceWith(fresh.cloneNode())
    return
  }
  for (const name of node.getAttributeNames()) if (!fresh.hasAttribute(name)) node.removeAttribute(name)
  for (const { name, value } of fresh.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value)
  fresh.childNodes.forEach((/** @type {Node} */ child, /** @type {number} */ i) => change(node.childNodes[i], child))
}

/**
 * Bring a row up to date by the cells that changed, but for one that has the focus.
 * @param {HTMLElement} row
 * @param {HTMLElement} fresh
 * @param {string} html
 */
const update = (row, fresh, html) => {
  clearTimeout(waiting.get(row))
  sources.set(row, html)
  localTimes(fresh)
  keepState(row, fresh)
  for (const name of Object.keys(row.dataset)) if (!(name in fresh.dataset)) delete row.dataset[name]
  Object.assign(row.dataset, fresh.dataset)
  const cells = [...row.children].map((cell, i) => [cell, fresh.children[i]])
  for (const [cell, other] of cells.filter(([cell, other]) => !cell.isEqualNode(other))) {
    if (!cell.matches(':focus-within')) {
      change(cell, other)
    } else {
      sources.delete(row)
      waiting.set(
        row,
        setTimeout(() => still(() => update(row, fresh, html)), WAIT_MS),
      )
    }
  }
}

/**
 * Replace rows by those with the same data-key.
 * @param {Element} body
 * @param {string} html
 * @returns {string[]} keys of rows that are not there
 */
export const replaceRows = (body, html) => {
  const missing = []
  for (const row of [...parsed(html).children]) {
    const old = body.querySelector(`:scope > [data-key="${CSS.escape(row.dataset.key)}"]`)
    if (old) update(old, row, row.outerHTML)
    else missing.push(row.dataset.key)
  }
  return missing
}

/** @param {Element|null} body @returns {Map<string, Found>} */
const byKey = (body) => new Map([...(body?.children ?? [])].map((row) => [row.dataset.key, row]))

/** Make a table body hold exactly these rows. @param {Element} body @param {Element} fresh */
export const matchRows = (body, fresh) => {
  const old = byKey(body)
  arrange(
    body,
    [...fresh.children].map((row) => brought(old.get(row.dataset.key), row)),
  )
}

/** The row that is there, brought up to date, or a new one. @param {Found|undefined} known @param {Found} row */
const brought = (known, row) => {
  const html = row.outerHTML
  if (known) {
    if (sources.get(known) !== html) update(known, row, html)
    return known
  }
  sources.set(row, html)
  localTimes(row)
  return row
}

/** Bring a table up to date by the rows that changed; all others stay. Beyond `most` only rows with data-kept do.
 * @param {Element} box
 * @param {{html: string, keys?: string[], most?: number}} changed as app/live/run_updates.py makes them */
export const mergeRows = (box, { html, keys, most = Infinity }) => {
  const body = box.querySelector('tbody')
  const fresh = byKey(parsed(html).querySelector('tbody'))
  if (!body) return show(box, html)
  sources.delete(box)
  const old = byKey(body)
  const order = keys ?? [...[...fresh.keys()].filter((key) => !old.has(key)), ...old.keys()]
  const rows = order.map((key) => {
    const row = fresh.get(key)
    return row ? brought(old.get(key), row) : old.get(key)
  })
  arrange(
    body,
    rows.flatMap((row, i) => (row && (i < most || 'kept' in row.dataset) ? [row] : [])),
  )
}

/** @param {Element} body @param {Element[]} rows that it shall hold */
const arrange = (body, rows) => {
  // A row that stays is not moved: that would take the focus from what is in it.
  const focused = document.activeElement
  const staying = new Set(rows)
  for (const row of [...body.children]) if (!staying.has(row)) row.remove()
  rows.forEach((row, i) => {
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null)
  })
  if (focused !== document.activeElement && body.contains(focused))
    /** @type {any} */ (focused).focus({ preventScroll: true })
}

/**
 * Show a fragment; its table keeps the rows that did not change, with the note above it.
 * @param {Element} box
 * @param {string} html
 */
export const show = (box, html) => {
  if (sources.get(box) === html) return
  sources.set(box, html)
  const content = parsed(html)
  const [body, fresh] = [box.querySelector('tbody'), content.querySelector('tbody')]
  if (body && fresh) {
    const [note, news] = [box.querySelector('[data-note]'), content.querySelector('[data-note]')]
    if (note && news) change(note, news)
    matchRows(body, fresh)
  } else {
    localTimes(content)
    keepState(box, content)
    box.replaceChildren(content)
  }
}
