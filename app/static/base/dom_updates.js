// What a person points at stays where it is: every live change of the document goes through here.
// It waits while a pointer is down or a control is in use; then all that it moved is scrolled back.
// The focus is kept too: a control that is replaced passes it on to its successor.
// (The browser's own scroll anchoring holds what is first in view, which may stand above the growth.)

/** No change waits longer, because a drag may take long and a release may be missed. */
const PATIENCE_MS = 5000
/** Time from the release of a finger to its click. */
const CLICK_MS = 300
const CONTROL = 'select, input:not([type=search]), textarea' // what is found is to be seen at once
const BARS = '.rail, .top, .tabs' // they stick, and stay by themselves
const FOCUSABLE = 'a[href], button, summary, [tabindex="0"]'
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

/** Element that had the focus last, unless the user has pointed elsewhere since. @type {any} */
let holder = null
/** What contained it before the last change, from the inside. @type {Found[]} */
let containers = []

/** What distinguishes controls of the same kind. @param {any} control */
const identity = (control) => {
  const names = ['id', 'href', 'name', 'value', 'popovertarget', 'aria-label'].map((name) => control.getAttribute(name))
  if (control.form) names.push(control.form.getAttribute('action'))
  return [control.tagName, ...(names.some(Boolean) ? names : [control.textContent])].join('\n')
}

/**
 * Return what took the place of the control that had the focus: its like in the same part of the page, or of
 * actions that depend on the status the one that is there now.
 * @returns {Found|undefined}
 */
const successor = () => {
  const [isRow, around] = [({ dataset }) => dataset.key !== undefined, containers.find((each) => each.isConnected)]
  if (holder.isConnected) {
    const group = holder.closest('[data-when]')?.parentElement
    const others = [...(group?.querySelectorAll(':scope > [data-when]') ?? [])].filter((each) => each.checkVisibility())
    return others[0]?.matches(FOCUSABLE) ? others[0] : others[0]?.querySelector(FOCUSABLE)
  }
  if (!around || around === document.body || containers.some((each) => !each.isConnected && isRow(each))) return
  const wanted = identity(holder)
  return [...around.querySelectorAll(FOCUSABLE)].find((each) => identity(each) === wanted && each.checkVisibility())
}

/** Call a function, then move the focus from a control that is gone to its successor, once there is one. */
const focusKept = (change) => {
  if (holder?.isConnected) {
    containers = []
    for (let each = holder.parentElement; each; each = each.parentElement) containers.push(each)
  }
  change()
  const active = document.activeElement
  if (!holder || (active !== document.body && active !== holder)) return
  if (!holder.isConnected || !holder.checkVisibility()) successor()?.focus({ preventScroll: true })
}

/** @param {() => void} change */
const held = (change) => {
  const element = attended()
  const [moved, row] = [watched(element), element?.closest('.tall tr')]
  const top = row?.getBoundingClientRect().top ?? 0
  focusKept(change)
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
listen(['focusin'], ({ target }) => {
  holder = target
})
listen(['pointerdown'], () => {
  holder = null
})
listen(['keydown'], () => {
  attended = () => document.activeElement
})
document.documentElement.addEventListener('pointerleave', () => {
  attended = () => null
})
