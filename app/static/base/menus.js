// Menus that open over the page, and what takes all of it.

/**
 * Put an open menu below the right end of its button, within the window.
 * @param {HTMLElement} menu
 * @param {Element} button
 */
export const placeBelow = (menu, button) => {
  const { right, bottom } = button.getBoundingClientRect()
  menu.style.left = `${Math.max(8, right - menu.offsetWidth)}px`
  menu.style.top = `${Math.max(8, Math.min(bottom + 4, innerHeight - menu.offsetHeight - 8))}px`
}

/** Show an element in full screen, or no longer. @param {Element} element */
export const toggleFullScreen = (element) =>
  document.fullscreenElement ? document.exitFullscreen() : element.requestFullscreen()

/** What the buttons of full screen are for. */
const FRAME = '.chart-panel'
document.addEventListener('click', ({ target }) => {
  const button = /** @type {Found} */ (target).closest('[data-full]')
  if (button) toggleFullScreen(/** @type {Element} */ (button.closest(FRAME)))
})
document.addEventListener('keydown', ({ key, target, ctrlKey, metaKey, altKey }) => {
  const element = /** @type {Found} */ (target)
  if (
    key.toLowerCase() === 'f' &&
    !ctrlKey &&
    !metaKey &&
    !altKey &&
    element.closest(FRAME) &&
    !element.matches('input:not([type=range]), select, textarea')
  )
    toggleFullScreen(/** @type {Element} */ (element.closest(FRAME)))
})
document.addEventListener('fullscreenchange', () => {
  for (const button of document.querySelectorAll('[data-full]'))
    button.ariaPressed = String(button.closest(FRAME) === document.fullscreenElement)
})

document.addEventListener('keydown', (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key]
  const menu = document.querySelector('.menu:popover-open')
  if (!step || !menu || event.target.matches('select, textarea, [list]')) return
  event.preventDefault()
  const items = [...menu.querySelectorAll('a, button, summary, input')].filter((item) => item.checkVisibility())
  const at = Math.max(
    items.findIndex((item) => item === document.activeElement),
    step < 0 ? 0 : -1,
  )
  items[(at + step + items.length) % items.length]?.focus()
})
