// Menus that open over the page.

/** Put an open menu below the right end of its button, within the window. @param {HTMLElement} menu @param {Element} button */
export const placeBelow = (menu, button) => {
  const { right, bottom } = button.getBoundingClientRect()
  menu.style.left = `${Math.max(8, right - menu.offsetWidth)}px`
  menu.style.top = `${Math.max(8, Math.min(bottom + 4, innerHeight - menu.offsetHeight - 8))}px`
}
