// Keys of every page: j, k and x go through the list of runs, c compares those selected, j and k go through
// the marked lines of a check, [ and ] to the neighbouring runs, g and a letter to a page, / to the search of the
// page or of all pages, Escape out of it, ? lists the keys, Ctrl+K leads anywhere, Ctrl+Enter starts the run of the
// page's form. A single key does nothing while the user types or a dialog is open, and can be switched off, as
// WCAG 2.1.4 requires.
import { openPalette } from 'palette'
import { root } from 'root'

const OFF = 'single-keys-off'
const FIELDS =
  'textarea, select, [contenteditable], input:not([type=checkbox], [type=radio], [type=button], [type=submit])'

const dialog = document.querySelector('[data-keys]')
const wish = dialog.querySelector('[data-single-keys]')
/** A browser may keep nothing for pages. @template T @param {() => T} use */
const kept = (use) => {
  try {
    return use()
  } catch {
    return null
  }
}
wish.checked = kept(() => localStorage.getItem(OFF)) === null
wish.addEventListener('change', () => {
  kept(() => (wish.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, 'yes')))
})

const LINKS = '[data-rows] .name a, [data-marked] th a'
const links = () => [...document.querySelectorAll(LINKS)]
const row = () => document.activeElement?.closest('[data-rows] tr, [data-marked] tr')
/** Last position of the cursor if nothing has the focus, also before a return to the page. @type {string|undefined} */
let last = history.state?.cursor
document.addEventListener('focusin', ({ target }) => {
  if (!target.matches(LINKS)) return
  last = target.href
  history.replaceState({ ...history.state, cursor: last }, '')
})
links()
  .find(({ href }) => href === last)
  ?.focus({ preventScroll: true })

// A form of a new run or sweep is ready to be typed in, unless its mistakes come first.
if (!location.hash && !document.querySelector('main [autofocus]')) {
  const fields = [...document.querySelectorAll('.run-form :is(input:not([type=radio]:not(:checked)), textarea)')]
  fields.find((each) => each.checkVisibility())?.focus({ preventScroll: true })
}

/**
 * The focus is the cursor: it stays in its row while others come and go, and is read out.
 * @param {number} step 1: down, -1: up
 */
const move = (step) => {
  const all = links()
  const at = all.findIndex((link) => link.matches('[aria-current]') || row()?.contains(link))
  const known = at >= 0 ? at : all.findIndex((link) => link.href === last)
  const wanted = known < 0 ? (step > 0 ? 0 : all.length - 1) : known + (at < 0 ? 0 : step)
  all[Math.min(Math.max(wanted, 0), all.length - 1)]?.focus()
}

const showKeys = () => {
  for (const each of dialog.querySelectorAll('[data-needed]')) {
    const { needed } = each.dataset
    each.hidden = !document.querySelector(needed)
  }
  dialog.showModal()
}

const SEARCHES = '#filter, [data-find-key], [data-metric-search] input, [data-log-search], [data-setting-search]'
/** Page of each key after g. @type {Record<string, string>} */
const PLACES = { r: '/runs', s: '/sweeps', e: '/reports', a: '/alerts', w: '/workers', n: '/runs/new' }
const AWAIT_MS = 1500
/** Time at which g was pressed. */
let awaited = -Infinity
/** @param {string} rel */
const follow = (rel) => {
  const link = document.querySelector(`link[rel=${rel}]`)
  if (link) location.assign(link.href)
  return Boolean(link)
}

/** Action of each key; returns whether it had an effect. @type {Record<string, () => boolean>} */
const keys = {
  j: () => {
    move(1)
    return links().length > 0
  },
  k: () => {
    move(-1)
    return links().length > 0
  },
  x: () => {
    const box = row()?.querySelector('.tick input')
    box?.click()
    return Boolean(box)
  },
  c: () => {
    const link = [...document.querySelectorAll('[data-compare]')].find((each) => each.checkVisibility())
    link?.click()
    return Boolean(link)
  },
  '/': () => {
    const box = [...document.querySelectorAll(SEARCHES)].find((each) => each.checkVisibility())
    if (box) box.focus()
    else openPalette(showKeys)
    return true
  },
  '[': () => follow('prev'),
  ']': () => follow('next'),
  g: () => {
    awaited = performance.now()
    return true
  },
  '?': () => {
    showKeys()
    return true
  },
}

document.addEventListener('keydown', (event) => {
  const { key, target, ctrlKey, metaKey, altKey, isComposing } = event
  if (isComposing || document.querySelector('dialog[open], :popover-open')) return
  if (key === 'k' && (ctrlKey || metaKey) && !altKey && !event.shiftKey) {
    event.preventDefault()
    return openPalette(showKeys)
  }
  const start = key === 'Enter' && (ctrlKey || metaKey) && document.querySelector('[data-start]')
  if (start) {
    event.preventDefault()
    return start.click()
  }
  // Of a search box with text the browser takes Escape.
  if (
    key === 'Escape' &&
    !event.defaultPrevented &&
    target.matches(SEARCHES) &&
    !(target.type === 'search' && target.value)
  )
    target.blur()
  if (ctrlKey || metaKey || altKey || !wish.checked || target.closest(FIELDS)) return
  const place = performance.now() - awaited < AWAIT_MS && PLACES[key]
  awaited = -Infinity
  if (place) {
    event.preventDefault()
    return location.assign(`${root}${place}`)
  }
  if (!(key in keys)) return
  if (keys[key]()) event.preventDefault()
})
document.querySelector('[data-open-palette]')?.addEventListener('click', () => openPalette(showKeys))
