// Go to a page or a run, or do what the page's own buttons do: a combobox in a dialog, as ARIA describes it.
import { fetched, inTurn } from 'http'
import { quoted } from 'completion'
import { root } from 'root'

/**
 * Limits of the runs that are shown, and of those among which one with just this name is; pages and actions are few.
 */
const [MOST_RUNS, MOST_READ] = [8, 50]

/** @typedef {{text: string, hint: string, go: () => void}} Entry */

const dialog = document.querySelector('[data-palette]')
const box = dialog.querySelector('input')
const list = dialog.querySelector('[role=listbox]')
const status = dialog.querySelector('[data-palette-status]')
/** The entries of the page, and the entries that are shown. @type {[Entry[], Entry[]]} */
let [here, shown] = [[], []]
let active = 0

/** @param {() => void} showKeys */
export const openPalette = (showKeys) => {
  const pages = [...dialog.querySelectorAll('nav a')]
    .filter((link) => getComputedStyle(link).display !== 'none')
    .map((link) => ({ text: link.textContent, hint: 'page', go: () => location.assign(link.href) }))
  // Those of the menu too, which are hidden only by its being closed.
  const isOffered = (each) =>
    !each.disabled &&
    each.textContent.trim() &&
    !each.closest('details, li') &&
    [each, each.parentElement].every((part) => getComputedStyle(part).display !== 'none' || part.matches('[popover]'))
  const actions = [...document.querySelectorAll('.top-actions :is(button, a)')]
    .filter(isOffered)
    .map((each) => ({ text: each.textContent.trim(), hint: 'on this page', go: () => each.click() }))
  here = [...actions, ...pages, { text: 'Keyboard shortcuts', hint: '?', go: showKeys }]
  box.value = ''
  show(here)
  dialog.showModal()
}

/** @param {Entry[]} entries */
const show = (entries) => {
  shown = entries
  list.replaceChildren(...entries.map(item))
  status.textContent = entries.length
    ? `${entries.length}${left ? ` of ${entries.length + left}` : ''} found`
    : 'No match.'
  point(0)
}

/** @param {Entry} entry @param {number} i */
const item = ({ text, hint }, i) => {
  const row = document.createElement('li')
  Object.assign(row, { id: `palette-entry-${i}`, role: 'option', ariaSelected: 'false' })
  for (const [words, name] of [
    [text, ''],
    [hint, 'quiet'],
  ])
    row.append(Object.assign(document.createElement('span'), { textContent: words, className: name }))
  return row
}

/** @param {number} i of the entry that Enter takes */
const point = (i) => {
  list.children[active]?.setAttribute('aria-selected', 'false')
  active = shown.length ? (i + shown.length) % shown.length : 0
  const row = list.children[active]
  if (!row) return box.removeAttribute('aria-activedescendant')
  row.setAttribute('aria-selected', 'true')
  row.scrollIntoView({ block: 'nearest' })
  box.setAttribute('aria-activedescendant', row.id)
}

/** Number of runs that were found and are not shown. */
let left = 0

/**
 * Runs whose name holds a text, and the one of that number, first those with just this name, newest first.
 * @param {string} text
 * @returns {Promise<Entry[]>}
 */
const runs = async (text) => {
  const id = /^(?:run )?#?(\d{1,9})$/i.exec(text)?.[1]
  const filters = [...(id ? [`id=${id}`] : []), `name:${quoted(text)}`]
  const pages = await Promise.all(
    filters.map(async (filter) => {
      const query = new URLSearchParams({ filter, limit: String(MOST_READ) })
      return (await fetched(`${root}/api/v1/runs?${query}`)).json()
    }),
  )
  const known = new Map(pages.flatMap((page) => page.runs).map((run) => [run.id, run]))
  const isOther = ({ id: own, name }) => Number(String(own) !== id && name.toLowerCase() !== text.toLowerCase())
  const found = [...known.values()].sort((a, b) => isOther(a) - isOther(b)).slice(0, MOST_RUNS)
  left = Math.max(known.size, pages.at(-1).total) - found.length
  return found.map(({ id, name, status }) => ({
    text: name,
    hint: `run ${id}, ${status}`,
    go: () => location.assign(`${root}/runs/${id}`),
  }))
}

/** Pages and actions at once: Enter shall never take what was shown for fewer letters. */
const find = () => {
  left = 0
  show(own())
  if (box.value.trim()) findRuns()
}
const own = () => here.filter(({ text }) => text.toLowerCase().includes(box.value.trim().toLowerCase()))

const findRuns = inTurn(async () => {
  const text = box.value.trim()
  try {
    const found = text ? await runs(text) : []
    if (box.value.trim() !== text) return
    const at = active
    show([...own(), ...found])
    point(at)
  } catch {
    status.textContent = 'The server does not answer, so runs cannot be searched.'
  }
})

/** @param {Entry|undefined} entry */
const take = (entry) => {
  if (!entry) return
  dialog.close()
  entry.go()
}

/** @type {Record<string, () => void>} */
const keys = { ArrowDown: () => point(active + 1), ArrowUp: () => point(active - 1), Enter: () => take(shown[active]) }
box.addEventListener('input', find)
box.addEventListener('keydown', (event) => {
  if (event.isComposing || !(event.key in keys)) return
  event.preventDefault()
  keys[event.key]()
})
list.addEventListener('click', ({ target }) => {
  const row = target.closest('li')
  if (row) take(shown[[...list.children].indexOf(row)])
})
// A click on what is behind it closes it.
dialog.addEventListener('click', ({ target }) => {
  if (target === dialog) dialog.close()
})
