// What a person points at stays where it is: every live change of the document goes through here.
// It waits while a pointer is down or a control is in use; then all that it moved is scrolled back.
// (The browser's own scroll anchoring holds what is first in view, which may stand above the growth.)

/** No change waits longer, because a drag may take long and a release may be missed. */
const PATIENCE_MS = 5000
/** Time from the release of a finger to its click. */
const CLICK_MS = 300
const CONTROL = 'select, input:not([type=search]), textarea' // what is found is to be seen at once
const BARS = '.rail, .top, .tabs' // they stick, and stay by themselves
const SCROLLED = '.log, .tall' // what is in them moves by their own scrolling, see hold

/** @type {Set<() => void>} */
const waiting = new Set()
let [isDown, usedAt, released, deadline] = [false, -Infinity, 0, 0]
/** Return the element that the user attends to. @type {() => Element|null} */
let attended = () => null

const isInUse = () => isDown || (document.activeElement?.matches(CONTROL) && performance.now() - usedAt < PATIENCE_MS)

/**
 * Change the document when the user is not interacting; a function that is pending already is called once.
 * @param {() => void} change
 */
export const still = (change) => {
  waiting.add(change)
  if (!isInUse()) flush()
  else deadline ||= setTimeout(flush, PATIENCE_MS)
}

const flush = () => {
  clearTimeout(deadline)
  deadline = 0
  const changes = [...waiting]
  waiting.clear()
  if (changes.length) held(() => changes.forEach((change) => change()))
}

/**
 * Scroll a box back by what was inserted above a row, until the pointer leaves the box.
 * @param {Element} row
 * @param {number} distance
 */
const hold = (row, distance) => {
  const box = /** @type {Element} */ (row.closest('.tall'))
  if (!distance) return
  if (!box.scrollTop)
    box.addEventListener(
      'pointerleave',
      () => {
        box.scrollTop = 0
      },
      { once: true },
    )
  box.scrollTop += distance
}

/** @param {() => void} change */
const held = (change) => {
  const element = attended()
  const [moved, row] = [watched(element), element?.closest('.tall tr')]
  const top = row?.getBoundingClientRect().top ?? 0
  change()
  const distance = moved()
  if (distance) scrollBy({ top: distance, behavior: 'instant' })
  if (row?.isConnected) hold(row, row.getBoundingClientRect().top - top)
}

/**
 * Return a function with the distance by which an element in view, or its remaining container, has moved down.
 * @param {Element|null} element
 * @returns {() => number}
 */
const watched = (element) => {
  if (!element) return () => 0
  const outer = element.closest(SCROLLED) ?? element
  const { top, bottom } = outer.getBoundingClientRect()
  if (bottom <= 0 || top >= innerHeight || outer.closest(BARS)) return () => 0
  const path = []
  for (let each = outer; each; each = each.parentElement) path.push([each, each.getBoundingClientRect().top])
  return () => {
    const [each, top] = path.find(([{ isConnected }]) => isConnected)
    return each.getBoundingClientRect().top - top
  }
}

const flushIfFree = () => {
  if (!isInUse()) flush()
}
/** @param {number} ms */
const release = (ms) => {
  clearTimeout(released)
  released = setTimeout(() => {
    isDown = false
    flushIfFree()
  }, ms)
}
const listen = (names, listener) => {
  for (const name of names) addEventListener(name, listener, true)
}
listen(['pointerdown', 'keydown', 'input'], () => {
  usedAt = performance.now()
})
listen(['pointerdown'], () => {
  clearTimeout(released)
  isDown = true
})
listen(['pointerup', 'pointercancel'], () => release(CLICK_MS))
listen(['click'], () => release(0)) // after all who listen to it
listen(['change', 'focusout'], () => {
  usedAt = -Infinity
  setTimeout(flushIfFree)
})
listen(['pointerdown', 'pointermove'], ({ clientX, clientY, buttons }) => {
  attended = () => document.elementFromPoint(clientX, clientY)
  if (isDown && !buttons) release(0) // elsewhere, as on a scrollbar
})
listen(['keydown'], () => {
  attended = () => document.activeElement
})
document.documentElement.addEventListener('pointerleave', () => {
  attended = () => null
})
