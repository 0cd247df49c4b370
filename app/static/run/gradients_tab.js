// What the panels and cards of the tab Gradients share: full screen, further rows, the menu of the precision lab.
import { placeBelow } from 'menus'

/** @param {Found} panel */
export const createGradientsTab = (panel) => {
  panel.addEventListener('click', ({ target }) => {
    const button = target.closest('button')
    if (button?.dataset.full !== undefined) button.closest('.chart-panel').requestFullscreen()
    if (button?.dataset.allRows === undefined) return
    for (const row of panel.querySelectorAll('#headroom tr[hidden]')) row.hidden = false
    button.remove()
  })
  panel.addEventListener('keydown', (event) => {
    if (event.key.toLowerCase() === 'f' && event.target.matches('.plot') && !event.ctrlKey && !event.metaKey && !event.altKey) event.target.closest('.chart-panel').requestFullscreen()
  })
  const menu = panel.querySelector('#lab-menu')
  menu?.addEventListener('toggle', () => { if (menu.matches(':popover-open')) placeBelow(menu, panel.querySelector('[popovertarget=lab-menu]')) })
}
