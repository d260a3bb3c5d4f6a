import torch, pytest
from .test_pointwise import *
S=[0.0,-0.0,1e-8,-1e-8,1e-30,-1e-30,1e-40,0.5,-0.5,1,-1,20,-20,88,-88,89,-89,100,-100,1e4,-1e4,1e20,-1e20,3e38,-3e38,float('inf'),-float('inf'),float('nan')]
@pytest.mark.parametrize("name", [n for n in ALL if "a0" in variables(ALL[n]) and n != "power_0"])
def test_special(device,name):
    a0,a1=torch.cartesian_prod(torch.tensor(S),torch.tensor(S)).T.contiguous()
    if "a1" not in variables(ALL[name]): a0,a1=torch.tensor(S),torch.tensor(S)
    env=dict(a0=a0.contiguous(),a1=a1.contiguous(),w=torch.full_like(a0,0.5),g=torch.ones_like(a0))
    want=truth(without_casts(ALL[name]),env)
    tru=truth(without_casts(ALL[name]),{k:v.double() for k,v in env.items()})
    got=run(pointwise_of(ALL[name]),env,device)
    for what,x,y,z in zip(("value","d0","d1","dw"),got,want,tru):
        bad=~torch.isclose(x,y,rtol=1e-3,atol=1e-6,equal_nan=True)
        bad&=~torch.isclose(x,z.float(),rtol=1e-3,atol=1e-6,equal_nan=True)
        if bad.any():
            print("BAD",name,what,int(bad.sum()),'/',len(bad))
            for i in bad.nonzero()[:,0][:6].tolist(): print("     ",float(env['a0'][i]),float(env['a1'][i]),"got",float(x[i]),"want",float(y[i]),float(z[i]))
