// The choices above charts: what x counts, smoothing, and the axis of the loss, which the menu of its panel has, too.
import { keepToolbar, recallToolbar } from 'chart_preferences'
import { setLog } from 'panel_axes'

/**
 * @param {HTMLElement} section
 * @param {import('url_state').View} view which gets what was chosen last
 * @param {import('panel_axes').Axes} arrangement
 * @param {{onChange: (field: string, wasZoomed: boolean) => void, onArrange: () => void}} options
 * onChange: the view has changed; onArrange: the arrangement, too
 */
export const createToolbar = (section, view, arrangement, { onChange, onArrange }) => {
  recallToolbar(section, view)
  const inputs = /** @type {any[]} */ ([...section.querySelectorAll('[data-view]')])
  const valueOf = (field) => (field === 'loss' ? (view.logs.includes('loss') ? 'log' : 'linear') : view[field])
  for (const input of inputs) {
    const field = input.dataset.view
    input.addEventListener('input', () => {
      const wasZoomed = view.range !== null
      if (field === 'loss') {
        setLog('loss', input.value === 'log', view, arrangement)
        onArrange()
      } else {
        view[field] = input.type === 'range' ? Number(input.value) : input.value
        if (field === 'x') view.range = null // the same numbers would mean another stretch
        keepToolbar(section, view)
      }
      onChange(field, wasZoomed)
    })
  }
  return {
    /** Show what the view has. */
    show: () => {
      for (const input of inputs) {
        const value = valueOf(input.dataset.view)
        if (input.type === 'radio') input.checked = input.value === value
        else input.value = value
      }
      const smooth = section.querySelector('[data-smooth]')
      if (smooth) smooth.textContent = String(view.smooth)
    },
  }
}
