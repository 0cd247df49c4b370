// Where gradients lie against fp16's window: the heat map, its module, and any other scale.
import { inTurn, insisted } from 'http'
import { createPlot } from 'charts'
import { count, percent, scale as scaleText } from 'formats'
import { heatFigure, lostAt } from 'heatmap'
import { still } from 'dom_updates'

/** @param {HTMLElement} section @param {string} api address of the run */
export const createGradients = (section, api) => {
  const part = (name) => section.querySelector(`[data-${name}]`)
  const [module, slider, asUsed] = [part('module'), part('slide-scale'), part('as-used')]
  const plot = createPlot(part('heat'), heatFigure)
  let samples = []
  /** @type {number|null} null: the scale of each step */
  let log2scale = null

  const draw = () => {
    if (!samples.length) return
    part('slid').innerHTML = log2scale === null ? 'as used' : scaleText(2 ** log2scale)
    asUsed.hidden = log2scale === null
    const last = samples.at(-1)
    const { underflow, nearOverflow } = lostAt(last, log2scale)
    const at = log2scale === null ? `At its scale, ${scaleText(last.scale)}` : `At a scale of ${scaleText(2 ** log2scale)}`
    part('lost').innerHTML = `${at}, <b>${percent(underflow)}</b> of the gradients of step ${count(last.step)} underflow and <b>${percent(nearOverflow)}</b> lie within a factor of four of overflow.`
    plot.draw({ samples, log2scale })
  }
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
  slider.addEventListener('input', () => { log2scale = Number(slider.value); draw() })
  asUsed.addEventListener('click', () => { log2scale = null; draw() })
  refresh()
  return { refresh }
}
