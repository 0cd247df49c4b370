// What the panels and cards of the tab Gradients share: further rows, the menu of the precision lab.
import { placeBelow } from 'menus'

/** @param {Found} panel */
export const createGradientsTab = (panel) => {
  panel.addEventListener('click', ({ target }) => {
    const button = target.closest('button')
    if (button?.dataset.allRows === undefined) return
    panel.querySelector('#headroom').classList.add('all')
    button.remove()
  })
  const menu = panel.querySelector('#lab-menu')
  menu?.addEventListener('toggle', () => {
    if (menu.matches(':popover-open')) placeBelow(menu, panel.querySelector('[popovertarget=lab-menu]'))
  })
}
