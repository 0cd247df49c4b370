// What a run showed, in a grid with a card for each name: as of the step that the slider is at.
import { createClassifierPlot } from 'classifier_plots'
import { createDataTable } from 'data_table'
import { count } from 'formats'
import { createLightbox } from 'lightbox'
import { asOf } from 'media_steps'
import { createOverSteps } from 'over_steps'

/** @typedef {import('media_steps').Shown} Shown */
/** A card that keeps its state from step to step. @typedef {{element: HTMLElement, show: (address: string) => unknown}} Widget */

/** @param {Shown} shown @returns {string} */
const addressOf = ({ figure }) => figure.querySelector('figcaption a').getAttribute('href') ?? ''
/** Pictures in the cells of a table have its name and theirs. @param {string} name @param {Iterable<string>} names */
const isOfTable = (name, names) => [...names].some((each) => each.endsWith('.csv') && name.startsWith(`${each.slice(0, -4)}.cell-`))

/**
 * @param {Found} box
 * @param {Found} table where the run's files are, step by step
 * @param {(root: ParentNode) => void} preview fills in texts
 */
export const createMedia = (box, table, preview) => {
  const slider = box.querySelector('input')
  const output = box.querySelector('output')
  const grid = box.querySelector('.media-grid')
  const overSteps = createOverSteps(box.querySelector('[data-over-steps]'), preview)
  /** @type {Shown[]} */
  let all = []
  /** @type {number[]} */
  let steps = []
  /** The card of each name. @type {Map<string, Found>} */
  const cards = new Map()
  /** @type {Map<string, Widget>} */
  const widgets = new Map()

  /** @param {string} name @returns {Widget|undefined} */
  const widgetOf = (name) => {
    if (!widgets.has(name) && name.endsWith('.plot.json')) widgets.set(name, createClassifierPlot(name))
    if (!widgets.has(name) && name.endsWith('.csv')) {
      widgets.set(name, createDataTable(name, (cell) => {
        if (!cell.endsWith('.png')) return undefined
        const picture = all.find((each) => each.name === cell && String(each.step) === cards.get(name)?.dataset.step)
        return picture && addressOf(picture)
      }))
    }
    return widgets.get(name)
  }
  const draw = () => {
    const step = steps[Number(slider.value)]
    output.textContent = count(step)
    slider.setAttribute('aria-valuetext', `step ${count(step)}`)
    const shown = asOf(all, step)
    for (const [name, card] of cards) card.hidden = !shown.has(name)
    for (const [name, each] of shown) {
      const { step: at, figure } = each
      if (isOfTable(name, shown.keys())) continue
      const card = cards.get(name) ?? /** @type {Found} */ (document.createElement('figure'))
      if (!cards.has(name)) {
        card.className = 'artifact'
        card.classList.toggle('wide', name.endsWith('.csv'))
        cards.set(name, card)
        grid.append(card)
      }
      if (card.dataset.step === String(at)) continue
      card.dataset.step = String(at)
      const copy = /** @type {Found} */ (figure.cloneNode(true))
      for (const part of copy.querySelectorAll('[data-seen]')) delete part.dataset.seen
      copy.querySelector('[role=region]')?.setAttribute('aria-label', `${name} as of the chosen step`)
      const caption = copy.querySelector('figcaption')
      caption.textContent = `${name} · step ${count(at)}`
      const widget = widgetOf(name)
      if (!widget) card.replaceChildren(...copy.children)
      else {
        if (!widget.element.isConnected) card.replaceChildren(widget.element, caption)
        else card.querySelector('figcaption').replaceWith(caption)
        widget.show(addressOf(each))
      }
    }
    preview(grid)
  }
  slider.addEventListener('input', draw)
  createLightbox(box.closest('section') ?? box, () => all.filter(({ figure }) => figure.querySelector('img'))
    .toSorted((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }) || a.step - b.step)
    .map((each) => ({ address: addressOf(each), caption: `${each.name} · step ${count(each.step)}` })))

  return {
    refresh: () => {
      const wasLast = Number(slider.value) === steps.length - 1 || !steps.length
      const at = steps[Number(slider.value)]
      all = [...table.querySelectorAll('figure[data-shows]')].map((figure) => ({
        name: figure.dataset.shows, step: Number(figure.closest('tr').dataset.key), figure,
      })).toSorted((a, b) => a.step - b.step)
      steps = [...new Set(all.map(({ step }) => step))]
      box.hidden = !steps.length
      if (box.hidden) return
      slider.setAttribute('max', String(steps.length - 1))
      slider.value = String(wasLast ? steps.length - 1 : steps.indexOf(at))
      draw()
      /** @type {Map<string, {step: number, address: string}[]>} */
      const byName = new Map()
      for (const each of all) byName.set(each.name, [...byName.get(each.name) ?? [], { step: each.step, address: addressOf(each) }])
      overSteps.refresh(byName)
    },
  }
}
