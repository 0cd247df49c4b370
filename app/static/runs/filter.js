// Completes the words of the list's filter: keys, what they can be, names of settings and metrics;
// and sends them together with the words that are chips already.
// A combobox as ARIA describes it: the focus stays in the box, aria-activedescendant names the word.
import { fetched } from 'http'
import { isUnfinished, proposals, wordAt } from 'completion'
import { root } from 'root'

const box = document.querySelector('#filter')
const list = document.querySelector('#filter-words')
/** @type {any} */
const form = document.querySelector('[data-filter]')
/** The words that are chips. */
const valid = form?.querySelector('[data-valid]')
const REFOCUS = 'filter-focus'
/** Requested when the box is first focused. @type {Promise<any>|null} */
let vocabulary = null
/**
 * Shown completions, and the part of the line that they replace.
 * @type {[import('completion').Proposal[], number, number, number]}
 */
let [shown, start, end, active] = [[], 0, 0, -1]

const close = () => {
  list.hidden = true
  active = -1
  box.setAttribute('aria-expanded', 'false')
  box.removeAttribute('aria-activedescendant')
}

/** @param {boolean} [first] whether to point at the first of them */
const propose = async (first = false) => {
  vocabulary ??= fetched(`${root}/api/v1/runs/autocomplete`).then((answer) => answer.json())
  let words
  try {
    words = await vocabulary
  } catch {
    vocabulary = null // the next key requests again
    return
  }
  if (document.activeElement !== box) return
  const cursor = box.selectionStart
  ;[start, end] = wordAt(box.value, cursor)
  const typed = box.value.slice(start, cursor)
  shown = proposals(words, typed)
  if (shown.every(({ text }) => text === box.value.slice(start, end))) return close()
  list.replaceChildren(...shown.map(item))
  list.hidden = false
  active = -1
  box.setAttribute('aria-expanded', 'true')
  box.removeAttribute('aria-activedescendant')
  if (first || isUnfinished(words, typed)) point(0)
}

const item = ({ text, hint }, i) => {
  const row = document.createElement('li')
  Object.assign(row, { id: `filter-word-${i}`, role: 'option', ariaSelected: 'false' })
  for (const [words, name] of [
    [text, ''],
    [hint, 'quiet'],
  ]) {
    const part = document.createElement('span')
    part.textContent = words
    part.className = name
    row.append(part)
  }
  return row
}

/** @param {number} i of the proposal that Enter or Tab would take */
const point = (i) => {
  list.children[active]?.setAttribute('aria-selected', 'false')
  active = (i + shown.length) % shown.length
  list.children[active].setAttribute('aria-selected', 'true')
  list.children[active].scrollIntoView({ block: 'nearest' })
  box.setAttribute('aria-activedescendant', `filter-word-${active}`)
}

/** @param {number} i */
const take = (i) => {
  const { text, isWhole } = shown[i]
  const rest = box.value.slice(end)
  const blank = isWhole && !rest.startsWith(' ') ? ' ' : ''
  box.value = box.value.slice(0, start) + text + blank + rest
  const cursor = start + text.length + (isWhole ? 1 : 0)
  box.setSelectionRange(cursor, cursor)
  close()
  if (!isWhole) propose()
}

/** Send the words of the chips and what was typed as one filter; the focus returns to the box. */
const apply = () => {
  sessionStorage.setItem(REFOCUS, 'yes')
  valid.value = [valid.value, box.value.trim()].filter(Boolean).join(' ')
  valid.disabled = !valid.value
  box.disabled = true // it is part of the other one
  form.submit()
}

/** Take the last chip away, and show the list without it. */
const removeLast = () => {
  const chip = [...form.querySelectorAll('[data-word]')].at(-1)
  if (!chip) return
  chip.remove()
  valid.value = [...form.querySelectorAll('[data-word]')].map(({ dataset }) => dataset.word).join(' ')
  apply()
  box.disabled = false // for the next key, should it come first
}

const keys = {
  Backspace: () => (box.value ? false : removeLast()),
  ArrowDown: () => (list.hidden ? propose(true) : point(active + 1)),
  ArrowUp: () => (list.hidden ? propose() : point(active < 0 ? shown.length - 1 : active - 1)),
  Enter: () => active >= 0 && (take(active), true),
  Tab: () => !list.hidden && active >= 0 && (take(active), true),
  Escape: () => !list.hidden && (close(), true),
}

if (box) {
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    apply()
  })
  addEventListener('pageshow', () => {
    box.disabled = false
  }) // after Back
  if (sessionStorage.getItem(REFOCUS)) {
    sessionStorage.removeItem(REFOCUS)
    box.focus({ preventScroll: true })
  }
  for (const [name, value] of Object.entries({
    role: 'combobox',
    'aria-expanded': 'false',
    'aria-controls': 'filter-words',
    'aria-autocomplete': 'list',
  })) {
    box.setAttribute(name, value)
  }
  for (const name of ['input', 'click']) box.addEventListener(name, () => propose())
  box.addEventListener('blur', close)
  box.addEventListener('keydown', (event) => {
    // A key that does nothing here does what it always does: Enter filters, Tab goes on, Esc clears.
    if (event.isComposing || !(event.key in keys)) return
    if (keys[event.key]() !== false) event.preventDefault()
  })
  list.addEventListener('pointerdown', (event) => {
    event.preventDefault() // the focus stays in the box
    const row = event.target.closest('li')
    if (row) take([...list.children].indexOf(row))
  })
}
