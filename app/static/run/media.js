// What a run showed, in a grid with a card for each name: as of the step that the slider is at.
import { count } from 'formats'

/** @typedef {{name: string, step: number, figure: Found}} Shown */

/** What a name last showed, up to a step. @param {Shown[]} all in order of steps @param {number} step @returns {Map<string, Shown>} */
export const asOf = (all, step) => new Map(all.filter((each) => each.step <= step).map((each) => [each.name, each]))

/**
 * @param {Found} box
 * @param {Found} table where the run's files are, step by step
 * @param {(root: ParentNode) => void} preview fills in texts
 */
export const createMedia = (box, table, preview) => {
  const slider = box.querySelector('input')
  const output = box.querySelector('output')
  const grid = box.querySelector('.media-grid')
  /** @type {Shown[]} */
  let all = []
  /** @type {number[]} */
  let steps = []
  /** The card of each name. @type {Map<string, Found>} */
  const cards = new Map()

  const draw = () => {
    const step = steps[Number(slider.value)]
    output.textContent = count(step)
    slider.setAttribute('aria-valuetext', `step ${count(step)}`)
    const shown = asOf(all, step)
    for (const [name, card] of cards) card.hidden = !shown.has(name)
    for (const [name, { step: at, figure }] of shown) {
      const card = cards.get(name) ?? /** @type {Found} */ (document.createElement('figure'))
      if (!cards.has(name)) {
        card.className = 'artifact'
        cards.set(name, card)
        grid.append(card)
      }
      if (card.dataset.step === String(at)) continue
      card.dataset.step = String(at)
      const copy = /** @type {Found} */ (figure.cloneNode(true))
      for (const each of copy.querySelectorAll('[data-seen]')) delete each.dataset.seen
      const caption = copy.querySelector('figcaption')
      caption.textContent = `${name} · step ${count(at)}`
      card.replaceChildren(...copy.children)
    }
    preview(grid)
  }
  slider.addEventListener('input', draw)

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
    },
  }
}
