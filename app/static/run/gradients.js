// Where gradients lie against fp16's window: the heat map, its module, and any other scale.
import { inTurn, insisted } from 'http'
import { fittedPlot } from 'charts'
import { count, percent, power, scale as scaleText } from 'formats'
import { heatFigure, lostAt, shareAt } from 'heatmap'
import { still } from 'dom_updates'

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }

/** @param {HTMLElement} section @param {string} api address of the run */
export const createGradients = (section, api) => {
  const panel = /** @type {Found} */ (section.closest('[data-panel]'))
  const [module, slider, slid] = ['module', 'slide-scale', 'slid'].map((name) => panel.querySelector(`[data-${name}]`))
  const [element, lost] = ['heat', 'lost'].map((name) => /** @type {Found} */ (section.querySelector(`[data-${name}]`)))
  const asUsed = Number(slider.getAttribute('max'))
  let samples = []
  /** Step and exponent of the cell that is read; null: none. @type {[number, number]|null} */
  let read = null
  const log2scale = () => (Number(slider.value) === asUsed ? null : Number(slider.value))

  const say = () => {
    const last = samples.at(-1)
    if (!last) return
    if (read) {
      const [i, exponent] = read
      const { step, scale } = samples[i]
      lost.innerHTML = `Step ${count(step)}, scale ${scaleText(scale)}: <b>${percent(shareAt(samples[i], exponent))}</b> of gradients at ${power(exponent)}`
      return
    }
    const { underflow, nearOverflow } = lostAt(last, log2scale())
    const at =
      log2scale() === null ? `At its scale, ${scaleText(last.scale)}` : `At ${scaleText(2 ** Number(log2scale()))}`
    lost.innerHTML = `${at}, <b>${percent(underflow)}</b> become 0, <b>${percent(nearOverflow)}</b> near overflow`
    lost.title = `Of the gradients of step ${count(last.step)}: below the smallest number of fp16; within a factor of four of the largest`
  }
  const plot = fittedPlot(element, heatFigure, {
    plotly_hover: ({ points }) => {
      const cell = points.find(({ customdata }) => customdata)
      if (cell) read = cell.customdata
      say()
    },
    plotly_unhover: () => {
      read = null
      say()
    },
  })
  const draw = () => {
    if (!samples.length) return
    const log2 = log2scale()
    slid.innerHTML = log2 === null ? 'as used' : scaleText(2 ** log2)
    say()
    plot.draw({ samples, log2scale: log2 })
  }
  element.addEventListener('keydown', (event) => {
    const by = ARROWS[event.key]
    if (!by || !samples.length) return
    event.preventDefault()
    const last = samples.length - 1
    const [i, exponent] = read ?? [last, samples[last].lowest_exponent]
    read = [Math.min(Math.max(i + by[0], 0), last), exponent + by[1]]
    say()
  })
  element.addEventListener('blur', () => {
    read = null
    say()
  })
  const refresh = inTurn(async () => {
    const query = module.value ? `?${new URLSearchParams({ module: module.value })}` : ''
    const found = await (await insisted(`${api}/histograms${query}`)).json()
    samples = found.samples
    const known = new Set([...module.options].map(({ value }) => value))
    still(() => {
      module.append(...found.modules.filter((name) => !known.has(name)).map((name) => new Option(name)))
      draw()
    })
  })

  module.addEventListener('input', refresh)
  slider.addEventListener('input', draw)
  refresh()
  return { refresh }
}
